"""What another batch, slice, type, checkpointing or number of microbatches would change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.config import Config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import parse_slice
from shardplan.model import Model
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan
from shardplan.search.open_choices import AUTOMATIC


@dataclass(frozen=True)
class Variant:
    """One change, and the best plan with it."""

    change: str
    plan: Plan | None
    """None where there is none."""
    why_not: str = ""
    """Why there is none."""


def what_if(config: Config, model: Model) -> list[Variant]:
    """The configuration itself, and one change at a time; where nothing fits, as much of a change as makes it fit."""
    start = _variant("as it is", config, model)
    variants = [start]
    for changes in _changes(config, start.plan is not None):
        for change, changed in changes:
            variants.append(_variant(change, changed, model))
            if start.plan is None and variants[-1].plan is not None:
                break
    return variants


def _variant(change: str, config: Config, model: Model) -> Variant:
    try:
        return Variant(change, make_plan(config, model))
    except (ConfigError, InfeasibleError) as error:
        return Variant(change, None, str(error))


def _changes(config: Config, fits: bool) -> Iterator[list[tuple[str, Config]]]:
    """Changes by what they change, the smallest first."""
    work = config.workload

    def with_work(**values: object) -> Config:
        return replace(config, workload=replace(work, **values))  # type: ignore[arg-type]

    halves = [work.batch >> n for n in range(1, work.batch.bit_length())]
    batches = [*halves[:1], work.batch * 2] if fits else halves
    parts = work.microbatches
    yield [
        (f"workload.batch {batch}", with_work(batch=batch, microbatches=parts and math.gcd(batch, parts)))
        for batch in batches
    ]
    yield [
        (f"hardware.slice {name}", replace(config, hardware=replace(config.hardware, slice=name)))
        for name in _other_slices(config.hardware.slice, fits)
    ]
    other = "bfloat16" if work.param_dtype == "float32" else "float32"
    yield [(f"workload.param_dtype {other}", with_work(param_dtype=other))]
    kinds = AUTOMATIC if work.kind == "train" else ()
    counts = [n for n in range(2, work.batch + 1) if work.batch % n == 0 and n != parts] if work.kind == "train" else []
    yield [(f"workload.microbatches {n}", with_work(microbatches=n)) for n in (counts[:1] if fits else counts)]
    yield [
        (f"workload.gradient_checkpointing {kind}", with_work(gradient_checkpointing=kind))
        for kind in kinds
        if kind != work.gradient_checkpointing
    ]


def _other_slices(name: str, fits: bool) -> list[str]:
    """The next smaller and the next larger slice of the same generation; all larger ones, where this does not fit."""
    hardware = parse_slice(name)
    generation = hardware.generation
    if hardware.is_cpu:
        return []
    chips = hardware.devices // hardware.slices // generation.devices_per_chip
    sizes = sorted({math.prod(torus) for torus in generation.sizes})
    smaller, larger = [n for n in sizes if n < chips], [n for n in sizes if n > chips]
    prefix = f"{hardware.slices}x" if hardware.slices > 1 else ""
    wanted = [*smaller[-1:], *larger[:1]] if fits else larger
    return [f"{prefix}{generation.name}-{size * generation.name_counts_per_chip}" for size in wanted]
