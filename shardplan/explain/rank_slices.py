"""Ranks slices for a workload: one plan per slice, by speed per chip or by cost per token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.cost.calibration import STEP_ERROR
from shardplan.errors import ConfigError, InfeasibleError, check_argument
from shardplan.explain.what_if import Variant
from shardplan.hardware import parse_slice
from shardplan.hardware.slice_selection import check_prices, select_slices
from shardplan.model.registry import Model
from shardplan.plan.displayed import Displayed
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan, model_from_config

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24
MILLION = 1_000_000


@dataclass(frozen=True)
class RankedSlice:
    """A slice on which a plan fits."""

    plan: Plan
    is_smallest: bool
    """Whether the slice is the smallest of its generation, among those planned for, on which a plan fits."""
    price: float | None = None
    """Price of a chip-hour, in the user's currency; None if not given."""
    tokens: float | None = None
    """Tokens of a whole run; None if not given."""

    @property
    def generation(self) -> str:
        """Name of the slice's generation."""
        return parse_slice(self.plan.hardware.slice).generation.name

    @property
    def chips(self) -> int:
        """Number of chips of all slices of the job."""
        return self.plan.hardware.devices // parse_slice(self.plan.hardware.slice).generation.devices_per_chip

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole slice."""
        return self.plan.workload.tokens / self.plan.cost.step_seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Tokens per second, divided by the number of chips."""
        return self.tokens_per_second / self.chips

    @property
    def cost_per_step(self) -> float | None:
        """Price of all chips for one step; None without a price."""
        if self.price is None:
            return None
        return self.price * self.chips * self.plan.cost.step_seconds / SECONDS_PER_HOUR

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Price of all chips for the time of a million tokens; None without a price."""
        cost = self.cost_per_step
        return None if cost is None else cost * MILLION / self.plan.workload.tokens

    @property
    def days(self) -> float | None:
        """Days of a whole run, without loading and saving; None if its number of tokens is unknown."""
        if self.tokens is None:
            return None
        return self.tokens / self.tokens_per_second / SECONDS_PER_HOUR / HOURS_PER_DAY

    @property
    def cost(self) -> float | None:
        """Price of all chips for a whole run; None without a price, or if the run's number of tokens is unknown."""
        if self.days is None or self.price is None:
            return None
        return self.price * self.chips * self.days * HOURS_PER_DAY

    @property
    def disadvantage(self) -> float:
        """The quantity that the ranking minimizes: cost per token with a price, else chip-seconds per token."""
        cost = self.cost_per_million_tokens
        return 1 / self.tokens_per_second_per_chip if cost is None else cost


@dataclass(frozen=True)
class SliceRanking(Displayed):
    """Slices ranked for a workload, and the slices on which no plan fits."""

    ranked: list[RankedSlice]
    """Slices on which a plan fits, best first: first those with a price, by cost per token; then the others, by tokens
    per second per chip."""
    failed: list[list[Variant]]
    """Variants of each generation on which no plan fits, smallest slice first."""
    unused_prices: list[str]
    """Generations with a price that have no slice in the ranking."""

    @property
    def best(self) -> list[RankedSlice]:
        """The first slice, and all slices within the estimates' error of it."""
        if not self.ranked:
            return []
        first = self.ranked[0]
        comparable = [each for each in self.ranked if (each.price is None) == (first.price is None)]
        return [each for each in comparable if each.disadvantage <= first.disadvantage * (1 + STEP_ERROR)]


def rank_slices(
    config: PlanConfig,
    names: Sequence[str],
    prices: Mapping[str, float] | None = None,
    model: Model | None = None,
    report: Callable[[str], None] = lambda _: None,
    tokens: float | None = None,
) -> SliceRanking:
    """Plan `config` for each of several slices, and rank the slices by tokens per second per chip, or by cost.

    Args:
        config: model, mesh and workload; its slice does not matter.
        names: one or more slices such as `v6e-8`, or generations such as `v6e`. A generation stands for all of its
            slices that have a name on Cloud TPU.
        prices: generation -> price of a chip-hour, in any currency.
        model: the model, if it has been built already.
        report: called with the name of what is planned next.
        tokens: tokens of a whole run; with it, the ranking includes the days and the cost of the run.

    Raises:
        ConfigError: a name is unknown, a price is not positive, or no slice can run the configuration.

    Example:
        >>> from shardplan import load_config, rank_slices
        >>> ranking = rank_slices(load_config(model={"config": "llama-3.1-8b"}), ["v6e-8", "v5e-1"], {"v6e": 2.7})
        >>> [each.plan.hardware.slice for each in ranking.ranked], len(ranking.failed)
        (['v6e-8'], 2)
    """
    check_config("rank_slices", config)
    check_argument("rank_slices", "prices", prices or {}, Mapping, "prices by generation, such as {'v6e': 2.7}")
    prices = prices or {}
    check_prices(prices)
    selected = select_slices([names] if isinstance(names, str) else names)
    model = model or model_from_config(config)
    ranked: list[RankedSlice] = []
    failed: list[list[Variant]] = []
    errors: list[ConfigError | InfeasibleError] = []
    for slices in selected:
        has_fitted = False
        failed.append([])
        for each in slices:
            report(f"{len(ranked)} slices planned, now {each.name}")
            try:
                plan = make_plan(replace(config, hardware=replace(config.hardware, slice=each.name)), model)
            except (ConfigError, InfeasibleError) as error:
                failed[-1].append(Variant(f"slice {each.name}", None, str(error)))
                errors.append(error)
                continue
            ranked.append(RankedSlice(plan, not has_fitted, prices.get(each.generation.name), tokens))
            has_fitted = True
    if not ranked and isinstance(errors[0], ConfigError) and len(set(map(str, errors))) == 1:
        raise errors[0]  # what is wrong has nothing to do with the slices
    unused = [name for name in prices if name not in {slices[0].generation.name for slices in selected}]
    ranked.sort(key=lambda each: (each.price is None, each.disadvantage))
    return SliceRanking(ranked, failed, unused)
