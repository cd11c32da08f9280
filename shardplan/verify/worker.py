"""One compile, in a process of its own: `python -m shardplan.verify.worker REQUEST VERDICT DUMP`.

The parent sets the environment (see `shardplan.verify.topology`) and `XLA_FLAGS`, so that the compiler leaves its
reports in DUMP, also when memory is exhausted.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from shardplan.errors import one_line
from shardplan.hardware import GIB, parse_slice
from shardplan.model import Model, build_model, inspect_model
from shardplan.plan.cost import step_flops
from shardplan.plan.memory import Workload
from shardplan.plan.plan import BATCH_AXIS, Plan
from shardplan.step import KERNEL_BLOCK, Program, attention_backend, specialize, step_program
from shardplan.verify.collectives import Network
from shardplan.verify.hlo import HloError, Module, parse
from shardplan.verify.memory import LARGEST, dumped, hbm_buffers, hbm_bytes
from shardplan.verify.timing import Timing, model_step
from shardplan.verify.topology import make_topology_mesh
from shardplan.verify.verdict import (
    DOES_NOT_FIT,
    FITS,
    REFUSED,
    Buffer,
    CompiledCollective,
    CompiledMemory,
    CompiledTime,
    Verdict,
)

LOAD = "load"
"""The program that assembles the model from the whole state dict in one jit, as Levanter's loader does."""


def main(request: str, verdict: str, dump: str) -> None:
    """Read the request, compile, write the verdict."""
    values = json.loads(Path(request).read_text(encoding="utf-8"))
    plan = Plan.from_json(values["plan"])
    model = build_model(values["hf_config"], plan.workload.position)
    result = judge(model, plan, values["program"], values["options"], Path(dump))
    Path(verdict).write_text(json.dumps(result.to_json()), encoding="utf-8")


def judge(model: Model, plan: Plan, name: str, options: dict[str, str], dump: Path) -> Verdict:
    """Compile one program of `plan` and read what came out.

    Args:
        name: `step` for that of the plan's workload, or `load`.
        dump: the folder that XLA_FLAGS names.
    """
    started = time.perf_counter()
    model = specialize(model, plan)
    verdict = Verdict(
        outcome=REFUSED,
        reason=_duplicate(plan),
        program=LOAD if name == LOAD else plan.workload.kind,
        slice=plan.hardware.slice,
        mesh=plan.mesh,
        options=options,
        attention=attention_backend(model, plan),
        compile_seconds=0.0,
        versions=plan.versions,
    )
    if verdict.reason:
        return verdict
    mesh = make_topology_mesh(parse_slice(plan.hardware.slice), plan.mesh)
    program = None
    try:
        program = _program(model, plan, mesh, name)
        compiled = program.lower().compile(compiler_options=dict(options))
    except Exception as error:  # whatever JAX and the compiler have against it
        changes: dict[str, Any] = _failure(error, plan, program, dump)
    else:
        text = compiled.as_text()
        stats = compiled.memory_analysis()
        module = parse(text)
        slices = [getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat]
        changes = {
            "outcome": FITS,
            "memory": CompiledMemory(
                peak=stats.peak_memory_in_bytes,
                arguments=stats.argument_size_in_bytes,
                temporaries=stats.temp_size_in_bytes,
                output=stats.output_size_in_bytes - stats.alias_size_in_bytes,
                available=int(plan.hardware.hbm_gib * GIB),
                buffers=_live_at_peak(module, program, dump)[:LARGEST],
            ),
            **_read_module(module, model, plan, Network(plan.mesh, parse_slice(plan.hardware.slice), slices)),
        }
    return dataclasses.replace(verdict, **changes, compile_seconds=time.perf_counter() - started)


def _duplicate(plan: Plan) -> str:
    """Why JAX would refuse to shard a parameter: two of its logical axes on one mesh axis. Empty where it would not."""
    for parameter in plan.parameters:
        users: dict[str, list[str]] = {}
        for axis, mesh_axes in zip(parameter.axes, parameter.spec, strict=True):
            for mesh_axis in mesh_axes or ():
                users.setdefault(mesh_axis, []).append(axis)
        for mesh_axis, axes in users.items():
            if len(axes) > 1:
                return f"DuplicateSpecError: {', '.join(axes)} of {parameter.path} are all mapped to {mesh_axis!r}"
    return ""


def _program(model: Model, plan: Plan, mesh: Any, name: str) -> Program:
    if name != LOAD:
        return step_program(model, plan, mesh)
    from shardplan.checkpoint.assemble import assemble_program

    return assemble_program(model, plan, mesh)


def _failure(error: Exception, plan: Plan, program: Program | None, dump: Path) -> dict[str, Any]:
    """Out of memory is a result; anything else is a refusal."""
    text = one_line(error, limit=600)
    if program is None or "RESOURCE_EXHAUSTED" not in text or "HBM" not in text.upper():
        return {"outcome": REFUSED, "reason": f"{type(error).__name__}: {text}"}
    modules = [parse(module) for module in dumped(dump, program.name, "after_optimizations")]
    if not modules:
        return {"outcome": DOES_NOT_FIT, "reason": text}
    available = int(plan.hardware.hbm_gib * GIB)
    buffers = _live_at_peak(modules[-1], program, dump)
    parameters = [i for i in modules[-1].entry.instructions.values() if i.opcode == "parameter"]
    arguments = sum(array.bytes for parameter in parameters for array in parameter.arrays)
    usage = list(dumped(dump, program.name, "memory-usage-report"))
    peak = hbm_bytes(usage[-1]) if usage else 0
    if peak <= available:  # a report of something else
        return {"outcome": DOES_NOT_FIT, "reason": text}
    largest = "; ".join(f"{b.bytes / GIB:.2f} GiB {b.shape} ({b.op})" for b in buffers[:3])
    return {
        "outcome": DOES_NOT_FIT,
        "reason": f"{(peak - available) / GIB:.2f} GiB too much; the largest: {largest}",
        "memory": CompiledMemory(peak, arguments, peak - arguments, 0, available, buffers[:LARGEST]),
    }


def _live_at_peak(module: Module, program: Program, dump: Path) -> list[Buffer]:
    reports = list(dumped(dump, program.name, "live-range"))
    return hbm_buffers(module, reports[-1]) if reports else []


def _read_module(module: Module, model: Model, plan: Plan, network: Network) -> dict[str, Any]:
    work = plan.workload
    blocks = max(1, work.position // KERNEL_BLOCK)
    try:
        timing = model_step(module, network, network.hardware, causal=(blocks + 1) / (2 * blocks))
    except HloError as error:
        return {"not_understood": {str(error): 1}}
    workload = Workload(
        BATCH_AXIS,
        work.batch,
        work.position,
        work.param_dtype,
        work.compute_dtype,
        work.kind,
        work.gradient_checkpointing,
    )
    flops = step_flops(inspect_model(model), workload)
    peak = network.hardware.generation.flops * network.hardware.devices
    return {
        "collectives": _collectives(timing),
        "time": CompiledTime(
            step_seconds=timing.seconds,
            compute_seconds=timing.compute_seconds,
            kernel_seconds=timing.kernel_seconds,
            model_flops=flops,
            mfu=flops / peak / timing.seconds if timing.seconds else 0.0,
            ops=dict(sorted(timing.op_seconds.items(), key=lambda item: -item[1])[:LARGEST]),
        ),
        "not_understood": dict(timing.not_understood),
    }


def _collectives(timing: Timing) -> list[CompiledCollective]:
    """Uses summed by kind, mesh axes, form and operation, the most bytes first."""
    sums: dict[tuple[str, tuple[str, ...], str, str], list[float]] = {}
    for use in timing.uses:
        transfer = use.transfer
        total = sums.setdefault((transfer.kind, transfer.mesh_axes, use.form, transfer.op), [0.0, 0, 0.0])
        total[0] += transfer.bytes * use.count
        total[1] += use.count
        total[2] += transfer.seconds * use.count
    rows = [
        CompiledCollective(kind, list(axes), round(size), int(count), seconds, op, form)
        for (kind, axes, form, op), (size, count, seconds) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


if __name__ == "__main__":
    main(*sys.argv[1:])
