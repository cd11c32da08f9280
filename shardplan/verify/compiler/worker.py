"""Compiles one program of a plan, in a separate process (see `__main__.py`).

The parent sets the environment (see `libtpu.py`) and `XLA_FLAGS`, so that the compiler writes its reports to DUMP, also
when memory is exhausted.
"""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_never

from jax.sharding import Mesh

from shardplan.checkpoint.levanter_loader import assemble_program
from shardplan.config.sections import CompiledProgram
from shardplan.errors import one_line
from shardplan.execution import Program, specialize, step_program
from shardplan.hardware import parse_slice
from shardplan.model.registry import Model, build_model
from shardplan.plan.plan import Plan
from shardplan.runtime.processes.watch.parent import end_with_parent
from shardplan.verify.compiler.compiled import Compiled, package_versions
from shardplan.verify.compiler.topology import make_topology_mesh

ASSIGNED = "after_buffer_assignment"
"""Ending of the name of the last report that the compiler writes before it makes code for the cores."""
ASSIGNED_POLL_SECONDS = 0.1
MAX_ERROR = 600
"""Maximum number of characters of an error that are kept."""


def main(request: str, compiled: str, dump: str) -> None:
    """Read the request file, compile, and write the result to the file `compiled`."""
    end_with_parent()
    values = json.loads(Path(request).read_text(encoding="utf-8"))
    plan = Plan.from_json(values["plan"])
    model = build_model(values["hf_config"], plan.workload.position)
    program = CompiledProgram(values["program"])
    answer = Path(compiled) if values["memory_only"] else None
    _compile_plan(model, plan, program, values["options"], Path(dump), answer).save(Path(compiled))


def _compile_plan(
    model: Model,
    plan: Plan,
    choice: CompiledProgram,
    options: Mapping[str, str],
    dump: Path,
    memory_answer: Path | None = None,
) -> Compiled:
    """Compile one program of `plan`; an error of JAX or the compiler becomes part of the result.

    Args:
        choice: the step of the workload, or Levanter's assembly of a loaded model.
        options: compiler options.
        dump: the folder into which XLA writes its reports (`--xla_dump_to`).
        memory_answer: file for the result if only memory is judged. This process then ends as soon as the compiler has
            assigned buffers; the function returns only if compiling fails.

    Raises:
        ConfigError: the plan's attention does not fit the model, or no mesh fits the slice.
    """
    started = time.perf_counter()
    model = specialize(model, plan)
    mesh = make_topology_mesh(parse_slice(plan.hardware.slice), plan.mesh)
    result = Compiled(
        attention=plan.attention.kernel,
        versions=package_versions(),
        slices=[getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat],
    )
    try:
        lowered = _program(model, plan, mesh, choice).lower()
        if memory_answer is None:
            compiled = lowered.compile(compiler_options=dict(options))
        else:
            ending = threading.Thread(target=_end_when_assigned, args=(result, dump, memory_answer, started))
            ending.daemon = True  # an error comes before the report that it waits for
            ending.start()
            compiled = lowered.compile(compiler_options=dict(options))
            ending.join()
    except Exception as error:  # whatever JAX or the compiler raises is a verdict
        text = f"{type(error).__name__}: {one_line(error, limit=MAX_ERROR)}"
        changes: dict[str, Any] = {
            "error": text,
            # an XLA error has its status code and the exhausted memory space in its text only
            "is_out_of_hbm": "RESOURCE_EXHAUSTED" in text and "HBM" in text.upper(),
            "module": _read_report(dump, "after_optimizations"),
        }
    else:
        stats = compiled.memory_analysis()
        changes = {
            "module": compiled.as_text(),
            "memory": {
                "peak": stats.peak_memory_in_bytes,
                "arguments": stats.argument_size_in_bytes,
                "temporaries": stats.temp_size_in_bytes,
                "output": stats.output_size_in_bytes - stats.alias_size_in_bytes,
                "host": stats.host_temp_size_in_bytes,
            },
        }
    return dataclasses.replace(result, **changes, **_memory_reports(dump), seconds=time.perf_counter() - started)


def _end_when_assigned(result: Compiled, dump: Path, answer: Path, started: float) -> None:
    """Write the result to the file `answer` after the compiler has assigned buffers, and end this process."""
    while not _reports(dump, ASSIGNED):
        time.sleep(ASSIGNED_POLL_SECONDS)
    assigned = dataclasses.replace(
        result,
        module=_read_report(dump, "after_optimizations"),
        **_memory_reports(dump),
        has_cycles=False,
        seconds=time.perf_counter() - started,
    )
    assigned.save(answer)
    os._exit(0)  # the compiler cannot be interrupted otherwise


def _memory_reports(dump: Path) -> dict[str, Any]:
    """Return field of `Compiled` -> the compiler's report, for the reports on memory."""
    return {"live_ranges": _read_report(dump, "live-range"), "usage": _read_report(dump, "memory-usage-report")}


def _program(model: Model, plan: Plan, mesh: Mesh, choice: CompiledProgram) -> Program:
    """Return the plan's program to compile: its step, or the program that assembles loaded arrays."""
    match choice:
        case CompiledProgram.STEP:
            return step_program(model, plan, mesh)
        case CompiledProgram.LOAD:
            return assemble_program(model, plan, mesh)
        case _:
            assert_never(choice)


def _read_report(dump: Path, kind: str) -> str:
    """Return the text of the compiler's report whose file name ends with `kind`; empty if there is none."""
    paths = _reports(dump, kind)
    return max(paths, key=lambda path: path.stat().st_size).read_text(errors="replace") if paths else ""


def _reports(dump: Path, kind: str) -> list[Path]:
    """Return the compiler's reports whose file names end with `kind`."""
    # JAX compiles small programs for the CPU while it traces; the names of their reports contain cpu
    return [path for path in dump.glob(f"*{kind}.txt") if ".cpu_" not in path.name]
