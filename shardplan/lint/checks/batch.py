"""Checks of the batch, at every stage of a schedule, against the divisors of Levanter's trainer and data loader."""

from itertools import pairwise

from shardplan.hardware.mesh_axes import MESH_AXES, TOKEN_AXES
from shardplan.levanter_config.trainer_section import BatchStage
from shardplan.lint.findings import Finding, FindingKind, Findings, Severity, product_text
from shardplan.lint.subject import Subject
from shardplan.plan.mapping import mesh_size
from shardplan.plan.workload.workload import BATCH_AXIS

BATCH_KEY, PER_DEVICE_KEY = "trainer.train_batch_size", "trainer.per_device_parallelism"


def check_batch(subject: Subject) -> Findings:
    """Find a batch size (the only one, or one in a schedule) that shards or microbatches do not divide."""
    if subject.section.stages:
        yield from _check_schedule(subject)
        return
    name, size, mesh = subject.section.batch_axis, subject.section.batch or subject.workload.batch, subject.section.mesh
    mesh_axes = subject.compute.get(name, ())
    shards = subject.devices(mesh_axes)
    key = BATCH_KEY if subject.section.batch else "workload.batch"
    if size % shards:
        around = (size // shards * shards, (size // shards + 1) * shards)
        yield Finding(
            Severity.ERROR,
            FindingKind.BATCH,
            (key, subject.size_key("model")),
            f"{size} sequences are not divisible by the {shards} batch shards of {product_text(mesh, mesh_axes)}",
            f"use {' or '.join(str(n) for n in around if n)} sequences, or a larger model axis",
            axes=frozenset({name, *MESH_AXES}),
        )
    elif subject.section.microbatch is not None and size % subject.section.microbatch:
        yield Finding(
            Severity.ERROR,
            FindingKind.BATCH,
            (key, PER_DEVICE_KEY, subject.size_key("model")),
            f"{size} sequences are not a multiple of the microbatch of {subject.section.microbatch}, "
            f"{subject.section.microbatch // shards} in each of {shards} batch shards",
            f"make per_device_parallelism a divisor of {size // shards}",
            axes=frozenset({name, *MESH_AXES}),
        )


def stage_divisor(subject: Subject) -> int:
    """Return the number that every stage of a schedule must be a multiple of.

    The trainer requires complete microbatches. Without `per_device_parallelism` it requires nothing of a schedule, and
    the data loader requires equal shards, unless it may pad them.
    """
    if subject.section.microbatch is not None:
        return subject.section.microbatch
    return 1 if subject.section.allows_padding else subject.devices(subject.compute.get(subject.section.batch_axis, ()))


def _check_schedule(subject: Subject) -> Findings:
    stages, divisor, shards = subject.section.stages, stage_divisor(subject), subject.section.batch_shards
    refused = [stage for stage in stages if stage.size % divisor]
    has_microbatch = subject.section.microbatch is not None
    parts = f"per_device_parallelism {divisor // shards} x {shards} batch shards" if has_microbatch else "batch shards"
    if refused:
        around = sorted({n for stage in refused for n in nearest_multiples(stage, divisor)})
        yield Finding(
            Severity.ERROR,
            FindingKind.BATCH,
            (BATCH_KEY, *((PER_DEVICE_KEY,) if has_microbatch else ()), subject.size_key("model")),
            f"{_stages_text(refused)} not divisible by {divisor} ({parts}), and Levanter stops before the first step",
            f"use multiples of {divisor} ({', '.join(map(str, around))})"
            + (", or a smaller per_device_parallelism" if has_microbatch else ", or a larger model axis"),
            axes=frozenset({subject.section.batch_axis, *MESH_AXES}),
        )
    starts = [stage.start for stage in stages]
    if starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
        yield Finding(
            Severity.WARNING,
            FindingKind.BATCH,
            (BATCH_KEY,),
            f"the stages start at the steps {', '.join(map(str, starts))}; Levanter expects the first at 0, and each "
            "after the one before",
            "sort the stages, and start the first one at step 0",
        )


def nearest_multiples(stage: BatchStage, divisor: int) -> list[int]:
    """Return the multiples of `divisor` next to a stage's batch size."""
    below = stage.size // divisor * divisor
    return [size for size in (below, below + divisor) if size > 0]


def _stages_text(stages: list[BatchStage]) -> str:
    texts = [f"the {stage.size} sequences from step {stage.start} on" for stage in stages]
    return f"{' and '.join(texts)} are"


def check_replicated_batch(subject: Subject) -> Findings:
    """Find a batch that no mesh axis shards."""
    name, size, mesh = subject.section.batch_axis, subject.workload.batch, subject.section.mesh
    is_sharded, is_mapped = subject.devices(subject.compute.get(name, ())) > 1, subject.section.is_batch_mapped
    if not is_mapped or (not is_sharded and mesh_size(mesh, TOKEN_AXES) > 1):
        yield Finding(
            Severity.WARNING if is_mapped else Severity.ERROR,
            FindingKind.BATCH,
            subject.keys([name]) or ("trainer.mesh.batch_axis_name",),
            f"{name!r} is replicated: every device computes all {size} sequences"
            if is_mapped
            else f"{name!r} is mapped to no mesh axis, and Levanter's data loader fails",
            "leave the batch axis at its default, which maps it to replica and data",
            axes=frozenset({name, BATCH_AXIS}),
        )
