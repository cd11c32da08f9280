"""Checks of a trainer section's predicted memory: steps that do not fit, large parameters with few shards."""

import dataclasses

from shardplan.hardware import GIB
from shardplan.lint.findings import Finding, FindingKind, Findings, Severity, sizes_text
from shardplan.lint.subject import Subject
from shardplan.plan.file.sections import MemoryPlan
from shardplan.plan.plan import Plan

LARGE_FRACTION = 0.01
"""Fraction of a device's memory at and above which a parameter counts as large."""
BARELY_SHARDED_FACTOR = 4
"""A parameter is barely sharded if it has at most 1 / this many shards per device."""
NUM_LARGEST = 3
"""How many of the largest memory parts and parameters a finding names."""
MEMORY_PARTS = [
    part.name
    for part in dataclasses.fields(MemoryPlan)
    if part.name not in ("peak", "available", "reserved", "host", "host_usable")
]


def check_memory(subject: Subject, plan: Plan) -> Findings:
    """Find a step that does not fit, or whose peak is so close to the limit that it may not fit."""
    memory = plan.memory
    if memory.fits:
        return
    if not memory.fits_host:
        yield Finding(
            Severity.ERROR,
            FindingKind.MEMORY,
            subject.mapping_keys,
            f"out of the memory of the host: {memory.host / GIB:.2f} GiB of activations for each device, of "
            f"{memory.host_usable / GIB:.2f}",
            "move fewer activations to the host (gradient_checkpointing), shard the batch over more devices, or use a "
            "larger slice",
        )
    if memory.peak <= memory.usable:
        return
    if memory.may_fit:
        yield Finding(
            Severity.WARNING,
            FindingKind.MEMORY,
            subject.mapping_keys,
            f"may not fit: {memory.peak / GIB:.2f} GiB per device of {memory.available / GIB:.2f}; the estimate errs "
            f"by up to {memory.reserved / GIB:.2f}, and the compiler computes values twice to make a program fit",
            "ask the compiler (shardplan verify --against), or shard more",
        )
        return
    parts = sorted(((getattr(memory, part), part) for part in MEMORY_PARTS), reverse=True)[:NUM_LARGEST]
    largest = subject.bytes(subject.axes.parameters)
    yield Finding(
        Severity.ERROR,
        FindingKind.MEMORY,
        subject.mapping_keys,
        f"out of memory: {memory.peak / GIB:.2f} GiB per device of {memory.available / GIB:.2f}, "
        f"{(memory.peak - memory.available) / GIB:.2f} too much; the largest parts: "
        + ", ".join(f"{part.replace('_', ' ')} {amount / GIB:.2f}" for amount, part in parts if amount)
        + f"; the largest parameters: {sizes_text(largest)}",
        "shard the largest over more mesh axes, or use a larger slice, a smaller batch, or a narrower type",
        {path: largest[path] for path in list(largest)[:NUM_LARGEST]},
    )


def check_large_parameters(subject: Subject, plan: Plan) -> Findings:
    """Find large parameters that are stored replicated, or with far fewer shards than there are devices."""
    min_bytes, devices = LARGE_FRACTION * plan.memory.available, subject.hardware.devices
    sizes = subject.bytes(subject.axes.parameters)
    large = [p for p in subject.axes.parameters if sizes[p.path] >= min_bytes]
    replicated = [p for p in large if subject.shards(p) == 1 and devices >= BARELY_SHARDED_FACTOR]
    barely_sharded = [
        p for p in large if subject.shards(p) > 1 and subject.shards(p) * BARELY_SHARDED_FACTOR <= devices
    ]
    numbers = " or ".join(map(str, sorted({subject.shards(p) for p in barely_sharded})))
    for kind, parameters, text in (
        (FindingKind.REPLICATED, replicated, f"replicated on each of the {devices} devices"),
        (FindingKind.BARELY_SHARDED, barely_sharded, f"{numbers} shards on {devices} devices"),
    ):
        if not parameters:
            continue
        stored = subject.bytes(parameters)
        axes_of_parameters = set[str]().union(*(parameter.axes for parameter in parameters))
        unmapped = [axis for axis in subject.weight_axes if axis in axes_of_parameters - subject.params.keys()]
        yield Finding(
            Severity.WARNING if plan.memory.may_fit else Severity.ERROR,
            kind,
            subject.mapping_keys,
            f"{text}: {sum(stored.values()) / GIB:.2f} GiB per device, of {sizes_text(stored)}",
            "shard the stored parameters over more mesh axes; unmapped among their axes: "
            + (", ".join(unmapped) or "none"),
            stored,
        )
