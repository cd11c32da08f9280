"""One compile, in a process of its own: `python -m shardplan.verify.worker REQUEST COMPILED DUMP`.

The parent sets the environment (see `shardplan.verify.topology`) and `XLA_FLAGS`, so that the compiler leaves its
reports in DUMP, also when memory is exhausted.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from shardplan.checkpoint.levanter_loader import assemble_program
from shardplan.errors import one_line
from shardplan.hardware import parse_slice
from shardplan.model import Model, build_model
from shardplan.plan.plan import Plan
from shardplan.step import Program, specialize, step_program
from shardplan.verify.compiled import Compiled
from shardplan.verify.topology import make_topology_mesh

LOAD = "load"
"""The program that assembles the model from the whole state dict in one jit, as Levanter's loader does."""
PACKAGES = ("jax", "jaxlib", "libtpu", "haliax", "levanter", "equinox", "optax")
"""What a compile depends on."""
PARENT_SECONDS = 1.0


def main(request: str, compiled: str, dump: str) -> None:
    """Read the request, compile, write what came out."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    values = json.loads(Path(request).read_text(encoding="utf-8"))
    plan = Plan.from_json(values["plan"])
    model = build_model(values["hf_config"], plan.workload.position)
    compile_plan(model, plan, values["program"], values["options"], Path(dump)).save(Path(compiled))


def versions() -> dict[str, str]:
    """Installed versions of what a compile depends on."""
    return {package: metadata.version(package) for package in PACKAGES}


def compile_plan(model: Model, plan: Plan, name: str, options: Mapping[str, str], dump: Path) -> Compiled:
    """Compile one program of `plan`.

    Args:
        name: `step` for that of the plan's workload, or `load`.
        dump: the folder that XLA_FLAGS names.
    """
    started = time.perf_counter()
    model = specialize(model, plan)
    mesh = make_topology_mesh(parse_slice(plan.hardware.slice), plan.mesh)
    result = Compiled(
        attention=plan.attention.kernel,
        versions=versions(),
        slices=[getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat],
    )
    try:
        compiled = _program(model, plan, mesh, name).lower().compile(compiler_options=dict(options))
    except Exception as error:  # whatever JAX and the compiler have against it
        changes: dict[str, Any] = {
            "error": f"{type(error).__name__}: {one_line(error, limit=600)}",
            "module": _report(dump, "after_optimizations"),
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
            },
        }
    return dataclasses.replace(
        result,
        **changes,
        live_ranges=_report(dump, "live-range"),
        usage=_report(dump, "memory-usage-report"),
        seconds=time.perf_counter() - started,
    )


def _program(model: Model, plan: Plan, mesh: Mesh, name: str) -> Program:
    return assemble_program(model, plan, mesh) if name == LOAD else step_program(model, plan, mesh)


def _report(dump: Path, kind: str) -> str:
    """The text that the compiler left in its dump; `kind` is the end of the file's name. Empty where there is none."""
    # JAX compiles small programs for the CPU while it traces; they say so in their names
    paths = [path for path in dump.glob(f"*{kind}.txt") if ".cpu_" not in path.name]
    return max(paths, key=lambda path: path.stat().st_size).read_text(errors="replace") if paths else ""


def _end_with_parent(parent: int) -> None:
    """A compile cannot be interrupted, and is of no use to anybody once its parent has gone."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
