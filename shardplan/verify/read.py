"""From what came out of a compile to the verdict. Pure."""

from collections.abc import Mapping
from typing import Any

from shardplan.cost.roofline import model_flops
from shardplan.hardware import GIB, parse_slice
from shardplan.model import Model
from shardplan.plan.plan import Plan
from shardplan.plan.workload import workload_of
from shardplan.positions.sequence_layout import attended
from shardplan.verify.compiled import Compiled
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.memory import LARGEST, hbm_buffers, hbm_bytes
from shardplan.verify.hlo.module import HloError, Module, parse
from shardplan.verify.hlo.timing import Timing, model_step
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


def read_verdict(compiled: Compiled, plan: Plan, model: Model, program: str, options: Mapping[str, str]) -> Verdict:
    """What `compiled`, one program of `plan`, means.

    Args:
        program: eval, train, prefill or load.
    """
    available = int(plan.hardware.hbm_gib * GIB)
    changes: dict[str, Any]
    try:
        module = parse(compiled.module) if compiled.module else None
    except HloError as error:
        module, changes = None, {"not_understood": {f"the compiled module: {error}": 1}}
    else:
        changes = {}
    buffers = hbm_buffers(module, compiled.live_ranges) if module else []
    if not compiled.error:
        changes["outcome"] = FITS
        changes["memory"] = CompiledMemory(**compiled.memory, available=available, buffers=buffers[:LARGEST])
        if module is not None:
            changes |= _time(module, compiled, plan, model, program)
    else:
        changes |= _failure(compiled, module, buffers, available)
    return Verdict(
        **{"outcome": REFUSED, "reason": "", **changes},
        program=program,
        slice=plan.hardware.slice,
        mesh=plan.mesh,
        options=dict(options),
        attention=compiled.attention,
        compile_seconds=compiled.seconds,
        versions=compiled.versions,
    )


def _failure(compiled: Compiled, module: Module | None, buffers: list[Buffer], available: int) -> dict[str, Any]:
    """Out of memory is a result; anything else is a refusal."""
    if "RESOURCE_EXHAUSTED" not in compiled.error or "HBM" not in compiled.error.upper():
        return {"outcome": REFUSED, "reason": compiled.error}
    peak = hbm_bytes(compiled.usage)
    if module is None or peak <= available:  # the reports are of something else
        return {"outcome": DOES_NOT_FIT, "reason": compiled.error}
    parameters = [i for i in module.entry.instructions.values() if i.opcode == "parameter"]
    arguments = sum(array.bytes for parameter in parameters for array in parameter.arrays)
    largest = "; ".join(f"{b.bytes / GIB:.2f} GiB {b.shape} ({b.op})" for b in buffers[:3])
    return {
        "outcome": DOES_NOT_FIT,
        "reason": f"{(peak - available) / GIB:.2f} GiB too much; the largest: {largest}",
        "memory": CompiledMemory(peak, arguments, peak - arguments, 0, available, buffers[:LARGEST]),
    }


def _time(module: Module, compiled: Compiled, plan: Plan, model: Model, program: str) -> dict[str, Any]:
    hardware, work = parse_slice(plan.hardware.slice), plan.workload
    network = Network(plan.mesh, hardware, compiled.slices)
    try:
        part = attended(plan.attention.order(work.position), model.pattern, plan.attention.gathers)
        timing = model_step(module, network, hardware, part)
    except HloError as error:
        return {"not_understood": {str(error): 1}}
    # assembling a model computes nothing that a model needs
    flops = model_flops(model, workload_of(work)) if program == work.kind else 0.0
    peak = hardware.generation.flops * hardware.devices
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
