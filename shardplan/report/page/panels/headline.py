"""The verdict at the top of the page: whether the plan fits, how fast it is, and what limits it."""

from dataclasses import dataclass

from shardplan.plan.file.details import ChangedSetting
from shardplan.plan.file.sections import MemoryVerdict
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import Judgement
from shardplan.report.page.panels.timeline import TimelineCost, costs_of_step
from shardplan.report.page.units import gib_text, seconds_text
from shardplan.verify.verdict import Outcome

LARGEST = 3
"""Number of costs, and of beneficial settings, that the verdict names."""
MIN_GAIN = 0.01
"""Relative gain of tokens per second and device below which a setting is not named."""


@dataclass(frozen=True)
class Figures:
    """The figures of a step, by the plan's estimate or by the compiler."""

    source: str
    seconds: str
    tokens: str
    mfu: str
    peak: str
    limit: str
    """Name of the cost that takes most of the step."""


@dataclass(frozen=True)
class Headline:
    """Content of the first panel."""

    outcome: Outcome
    sentence: str
    reason: str
    figures: list[Figures]
    costs: list[TimelineCost]
    settings: list[ChangedSetting]
    """All settings of the planned workload."""
    better: list[tuple[str, str]]
    """Settings with the most tokens per second and device, and the effects of each, in words."""


def make_headline(plan: Plan, judgement: Judgement | None) -> Headline:
    """Summarize a plan, and the verdict on its step if there is one."""
    settings = plan.details.settings if plan.details is not None else []
    costs = [cost for cost in costs_of_step(plan) if cost.exposed_seconds][:LARGEST]
    return Headline(
        outcome=judgement.outcome if judgement else (Outcome.FITS if plan.memory.fits else Outcome.DOES_NOT_FIT),
        sentence=_fit_sentence(plan, judgement),
        reason=judgement.reason if judgement else "",
        figures=[_estimate_figures(plan), *(_compiled_figures(plan, judgement) if judgement else [])],
        costs=costs,
        settings=settings,
        better=_best_settings(plan, settings),
    )


def _fit_sentence(plan: Plan, judgement: Judgement | None) -> str:
    memory, compiled = plan.memory.verdict, judgement.memory if judgement else None
    if compiled is not None:
        # all that a device has, because what the compiler needs is no estimate with an error
        memory = MemoryVerdict(compiled.peak <= compiled.available, compiled.peak, compiled.available)
    source = "by the TPU compiler" if compiled else "by the estimate"
    if judgement is not None and compiled is None:
        return f"the compiler gives no memory; the estimate is {gib_text(plan.memory.peak)}"
    size, limit, rest = map(gib_text, (memory.bytes, memory.limit, abs(memory.limit - memory.bytes)))
    if memory.fits:
        return f"{size} of {limit} {memory.place} {source}, {rest} free"
    return f"{size} {memory.place} {source}, {limit} usable: {rest} missing"


def _estimate_figures(plan: Plan) -> Figures:
    return _figures("estimate", plan, plan.cost.step_seconds, plan.cost.compute_seconds, plan.mfu, plan.memory.peak)


def _compiled_figures(plan: Plan, judgement: Judgement) -> list[Figures]:
    time, memory = judgement.time, judgement.memory
    if memory is None:
        return []
    if time is None:  # of a program that does not fit
        return [Figures("TPU compiler", "-", "-", "-", gib_text(memory.peak), "-")]
    mfu = time.mfu if time.model_flops else None
    return [_figures("TPU compiler", plan, time.step_seconds, time.compute_seconds, mfu, memory.peak)]


def _figures(source: str, plan: Plan, seconds: float, computing: float, mfu: float | None, peak: int) -> Figures:
    part = computing / seconds if seconds else 1.0
    return Figures(
        source=source,
        seconds=seconds_text(seconds),
        tokens=f"{plan.workload.tokens / seconds:,.0f}" if seconds else "-",
        mfu=f"{mfu:.1%}" if mfu is not None else "-",
        peak=gib_text(peak),
        limit=f"compute ({part:.0%} of the step)" if part >= 0.5 else f"collectives ({1 - part:.0%} of the step)",
    )


def _best_settings(plan: Plan, settings: list[ChangedSetting]) -> list[tuple[str, str]]:
    """Return the settings with the most tokens per second and device, the best first."""
    now = plan.workload.tokens / plan.cost.step_seconds / plan.hardware.devices
    gains = [(each.tokens_per_second / each.devices / now - 1, each) for each in settings if not each.obstacle]
    named = sorted((pair for pair in gains if pair[0] >= MIN_GAIN), key=lambda pair: -pair[0])[:LARGEST]
    return [
        (
            each.change,
            f"{gain:+.0%} tokens/s per device, {seconds_text(each.step_seconds)} a step, {gib_text(each.peak)}",
        )
        for gain, each in named
    ]
