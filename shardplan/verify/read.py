"""Reads the result of a compile into a verdict. Pure."""

from collections.abc import Mapping
from typing import Any

from shardplan.hardware import GIB, parse_slice
from shardplan.plan.plan import Plan
from shardplan.verify.compiler.compiled import Compiled
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.kernels import KernelWork
from shardplan.verify.hlo.module import HloError, Module
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.peak_buffers import hbm_buffers, hbm_bytes, host_bytes, live_bytes
from shardplan.verify.hlo.timing import Timing, model_step
from shardplan.verify.model_facts import ModelFacts
from shardplan.verify.verdict import (
    Buffer,
    CollectiveForm,
    CompiledCollective,
    CompiledMemory,
    CompiledTime,
    CompileError,
    LiveBytes,
    Omission,
    OmissionKind,
    Outcome,
    OutOfMemory,
    Verdict,
)

MAX_ROWS = 12
"""Maximum number of buffers and of operations that a verdict lists."""
MAX_NAMED_BUFFERS = 3
"""Maximum number of buffers that the reason of a verdict names."""


def read_verdict(
    compiled: Compiled, plan: Plan, facts: ModelFacts, program: str, options: Mapping[str, str]
) -> Verdict:
    """Return the verdict on `compiled`, one program of `plan`."""
    available = int(plan.hardware.hbm_gib * GIB)
    values: dict[str, Any] = {}
    try:
        module = parse(compiled.module) if compiled.module else None
    except HloError as error:
        module = None
        values["not_understood"] = {Omission(OmissionKind.MODULE_TEXT, detail=str(error)): 1}
    buffers = hbm_buffers(module, compiled.live_ranges, compiled.usage) if module else []
    live = live_bytes(module, compiled.live_ranges) if module else []
    if not compiled.error:
        sizes = dict(compiled.memory)
        if module is not None and not compiled.has_cycles:
            sizes = _reported_sizes(module, compiled.usage)
        elif sizes.get("host"):  # the compiler's peak counts it as well
            sizes["peak"] = hbm_bytes(compiled.usage)
        memory = CompiledMemory(**sizes, available=available, buffers=buffers[:MAX_ROWS], live=live)
        values |= {"outcome": Outcome.FITS, "reason": None, "memory": memory}
        if module is not None:
            values |= _time_fields(module, compiled, plan, facts)
    else:
        values |= _failure_fields(compiled, module, buffers, live, available)
    return Verdict(
        **values,
        program=program,
        slice=plan.hardware.slice,
        mesh=plan.mesh,
        options=dict(options),
        attention=compiled.attention,
        compile_seconds=compiled.seconds,
        versions=compiled.versions,
    )


def _failure_fields(
    compiled: Compiled, module: Module | None, buffers: list[Buffer], live: list[LiveBytes], available: int
) -> dict[str, Any]:
    """Return the fields of the verdict on a program that did not compile: out of memory, or refused."""
    if not compiled.is_out_of_hbm:
        return {"outcome": Outcome.REFUSED, "reason": CompileError(compiled.error)}
    peak = hbm_bytes(compiled.usage)
    if module is None or peak <= available:  # the reports are of another program
        return {"outcome": Outcome.DOES_NOT_FIT, "reason": CompileError(compiled.error)}
    sizes = _reported_sizes(module, compiled.usage)
    return {
        "outcome": Outcome.DOES_NOT_FIT,
        "reason": OutOfMemory(peak - available, buffers[:MAX_NAMED_BUFFERS]),
        "memory": CompiledMemory(**sizes, available=available, buffers=buffers[:MAX_ROWS], live=live),
    }


def _reported_sizes(module: Module, usage: str) -> dict[str, int]:
    """Return field of `CompiledMemory` -> bytes, from the compiler's report, for a result that has only reports.

    The report does not distinguish the output from temporaries.
    """
    parameters = [i for i in module.entry.instructions.values() if i.opcode == "parameter"]
    arguments = sum(array.bytes for parameter in parameters for array in parameter.arrays)
    peak = hbm_bytes(usage)
    return {
        "peak": peak, "arguments": arguments, "temporaries": peak - arguments, "output": 0, "host": host_bytes(usage),
    }  # fmt: skip


def _time_fields(module: Module, compiled: Compiled, plan: Plan, facts: ModelFacts) -> dict[str, Any]:
    """Return the verdict's collectives, and the modelled time of a step if the compiler has estimated cycles."""
    hardware = parse_slice(plan.hardware.slice)
    network = Network(plan.mesh, hardware, compiled.slices)
    try:
        timing = model_step(module, network, hardware, KernelWork(facts.attended_fraction, facts.routed_rows))
    except HloError as error:
        return {"not_understood": {Omission(OmissionKind.MODULE_STRUCTURE, detail=str(error)): 1}}
    if not compiled.has_cycles:
        return {"collectives": _sum_collectives(timing)}
    peak = hardware.generation.flops * hardware.devices
    return {
        "collectives": _sum_collectives(timing),
        "time": CompiledTime(
            step_seconds=timing.seconds,
            compute_seconds=timing.compute_seconds,
            kernel_seconds=timing.kernel_seconds,
            masked_dense_seconds=timing.masked_dense_seconds,
            model_flops=facts.flops,
            mfu=facts.flops / peak / timing.seconds if timing.seconds else 0.0,
            ops=dict(sorted(timing.op_seconds.items(), key=lambda item: -item[1])[:MAX_ROWS]),
        ),
        "not_understood": dict(timing.not_understood),
    }


def _sum_collectives(timing: Timing) -> list[CompiledCollective]:
    """Return the uses of collectives, summed by kind, mesh axes, form and operation, most bytes first."""
    sums: dict[tuple[str, tuple[str, ...], CollectiveForm, str], list[float]] = {}
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
