"""Plans with one setting changed: batch, slice, dtype, gradient checkpointing or number of microbatches."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import parse_slice
from shardplan.model.registry import Model
from shardplan.plan.displayed import Displayed
from shardplan.plan.file.details import ChangedSetting, Details
from shardplan.plan.plan import Plan
from shardplan.search.fastest_batch import MAX_TOKENS
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.search.open_choices import AUTO_CHECKPOINTING

CURVE_DOUBLINGS = 3
"""Number of times that an evaluation's batch is doubled, and halved."""


@dataclass(frozen=True)
class Variant:
    """One change of a configuration, and the best plan with it."""

    change: str
    plan: Plan | None
    """The best plan; None if there is none."""
    obstacle: str = ""
    """Why there is no plan; empty if there is one."""


@dataclass(frozen=True)
class WhatIf(Displayed):
    """The plan of a configuration, and its plans with one setting changed."""

    variants: list[Variant]
    """The unchanged configuration, then one variant for each change."""


def what_if(config: PlanConfig, model: Model | None = None, report: Callable[[str], None] = lambda _: None) -> WhatIf:
    """Plan `config` unchanged, and with one change at a time; if nothing fits, enlarge each change until a plan fits.

    Args:
        model: the model, if it has been built already.
        report: called with the name of what is planned next.
    """
    check_config("what_if", config)
    model = model or model_from_config(config)
    report("as it is")
    start = _plan_variant("as it is", config, model)
    variants = [start]
    families = list(_changes(config, start.plan is not None))
    most = 1 + sum(map(len, families))
    for changes in families:
        for change, changed in changes:
            report(f"{len(variants)} of at most {most} planned, now {change}")
            variants.append(_plan_variant(change, changed, model))
            if start.plan is None and variants[-1].plan is not None:
                break
    return WhatIf(variants)


def with_settings(plan: Plan, answer: WhatIf) -> Plan:
    """Add the variants to the plan's details, except the first one, which is unchanged."""
    settings = [_changed_setting(variant) for variant in answer.variants[1:]]
    return replace(plan, details=replace(plan.details or Details(), settings=settings))


def _changed_setting(variant: Variant) -> ChangedSetting:
    plan = variant.plan
    if plan is None:
        return ChangedSetting(variant.change, variant.obstacle)
    return ChangedSetting(
        change=variant.change,
        obstacle="",
        step_seconds=plan.cost.step_seconds,
        tokens_per_second=plan.workload.tokens / plan.cost.step_seconds,
        peak=plan.memory.peak,
        available=plan.memory.available,
        devices=plan.hardware.devices,
    )


def summarize_failures(variants: Sequence[Variant]) -> list[str]:
    """Explain why settings have no plan, in one sentence per key."""
    failed = [variant for variant in variants if variant.plan is None]
    sentences = []
    for _, group in itertools.groupby(failed, key=lambda variant: variant.change.rpartition(" ")[0]):
        first, *others = group
        if not others:
            sentences.append(f"{first.change}: {first.obstacle}")
            continue
        values = [variant.change.rpartition(" ")[2] for variant in others]
        # the last value is the largest change, so that it misses by least
        changes = (
            f"{first.change} to {values[-1]} ({len(values) + 1} values)"
            if values[1:]
            else (f"{first.change} and {values[0]}")
        )
        sentences.append(f"{changes}: none has a plan; for the last, {others[-1].obstacle}")
    return sentences


def _plan_variant(change: str, config: PlanConfig, model: Model) -> Variant:
    try:
        return Variant(change, make_plan(config, model))
    except (ConfigError, InfeasibleError) as error:
        return Variant(change, None, str(error))


def _changes(config: PlanConfig, fits: bool) -> Iterator[list[tuple[str, PlanConfig]]]:
    """Yield the changes of each key, smallest first.

    Args:
        fits: whether a plan for `config` fits; if not, all smaller batches, larger slices and more microbatches follow.
    """
    work = config.workload

    def with_work(**values: object) -> PlanConfig:
        return replace(config, workload=replace(work, **values))  # type: ignore[arg-type]

    halves = [work.batch >> n for n in range(1, work.batch.bit_length())]
    # the batch of training decides what is learned; that of other work is free, so that a curve is of interest
    doublings = 1 if work.is_training else CURVE_DOUBLINGS
    larger = [work.batch << n for n in range(1, doublings + 1) if n == 1 or work.tokens << n <= MAX_TOKENS]
    batches = [*reversed(halves[:doublings]), *larger] if fits else halves
    parts = work.microbatches
    other_batches = []
    for batch in batches:
        changed = with_work(batch=batch, microbatches=parts and math.gcd(batch, parts))
        other_batches.append((f"workload.batch {batch}", changed))
    yield other_batches
    other_slices = []
    for name in _other_slices(config.hardware.slice, fits):
        other_slices.append((f"hardware.slice {name}", replace(config, hardware=replace(config.hardware, slice=name))))
    yield other_slices
    other = "bfloat16" if work.param_dtype == "float32" else "float32"
    yield [(f"workload.param_dtype {other}", with_work(param_dtype=other))]
    is_given = work.is_training and parts is not None  # otherwise every number is tried already
    counts = [n for n in range(2, work.batch + 1) if work.batch % n == 0 and n != parts] if is_given else []
    yield [(f"workload.microbatches {n}", with_work(microbatches=n)) for n in (counts[:1] if fits else counts)]
    if work.is_training:
        kinds = [kind for kind in AUTO_CHECKPOINTING if kind != work.gradient_checkpointing]
        yield [(f"workload.gradient_checkpointing {kind}", with_work(gradient_checkpointing=kind)) for kind in kinds]


def _other_slices(name: str, fits: bool) -> list[str]:
    """Return the next smaller and next larger slice of the generation; all larger ones if the plan does not fit."""
    hardware = parse_slice(name)
    generation = hardware.generation
    if hardware.is_cpu:
        return []
    chips = hardware.devices // hardware.slices // generation.devices_per_chip
    sizes = sorted({math.prod(torus) for torus in generation.sizes})
    smaller, larger = [n for n in sizes if n < chips], [n for n in sizes if n > chips]
    prefix = f"{hardware.slices}x" if hardware.slices > 1 else ""
    others = [*smaller[-1:], *larger[:1]] if fits else larger
    return [f"{prefix}{generation.name}-{size * generation.name_counts_per_chip}" for size in others]
