"""Which slice to use: a plan for every named slice of some generations, and its speed per chip."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardplan.config import PlanConfig
from shardplan.config.sections import HardwareConfig
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.explain.what_if import Variant
from shardplan.hardware import GENERATIONS, standard_slices
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan


@dataclass(frozen=True)
class RankedSlice:
    """A slice on which a plan fits."""

    chips: int
    plan: Plan
    is_smallest: bool
    """Whether no smaller named slice of its generation fits."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole slice."""
        return self.plan.workload.tokens / self.plan.cost.step_seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Tokens per second, divided by the number of chips."""
        return self.tokens_per_second / self.chips


@dataclass(frozen=True)
class SliceRanking:
    """The slices of some generations."""

    ranked: list[RankedSlice]
    """Those on which a plan fits, by tokens per second per chip, the best first."""
    failed: list[list[Variant]]
    """The others of each generation, smallest first."""


def rank_slices(
    config: PlanConfig, model: Model, generations: Sequence[str], report: Callable[[str], None] = lambda _: None
) -> SliceRanking:
    """Plan `config` for every slice of `generations` that has a name on Cloud TPU.

    Args:
        report: called with what is planned next.
    """
    ranked: list[RankedSlice] = []
    failed: list[list[Variant]] = []
    for name in generations:
        generation, has_fitted = GENERATIONS[name], False
        failed.append([])
        for each in standard_slices(generation):
            report(f"{len(ranked)} slices planned, now {each.name}")
            try:
                plan = make_plan(replace(config, hardware=HardwareConfig(each.name)), model)
            except (ConfigError, InfeasibleError) as error:
                failed[-1].append(Variant(f"slice {each.name}", None, str(error)))
                continue
            ranked.append(RankedSlice(each.devices // generation.devices_per_chip, plan, not has_fitted))
            has_fitted = True
    return SliceRanking(sorted(ranked, key=lambda each: -each.tokens_per_second_per_chip), failed)
