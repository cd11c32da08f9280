"""The slices and prices that a user names to rank slices: `v5e v6e-8 2xv6e-256`, and `v6e=2.70,v5p=4.20`."""

import math
import re
from collections.abc import Iterable, Mapping

from shardplan.errors import ConfigError, nearest
from shardplan.hardware.generations import GENERATIONS
from shardplan.hardware.slice_spelling import GENERATION_SPELLINGS, NAME, standard_spelling
from shardplan.hardware.slices import Slice, parse_slice, standard_slices

ALL = "all"
"""Name that stands for every generation."""
EXAMPLE = "for example v6e=2.70"


def select_slices(names: Iterable[str]) -> list[tuple[Slice, ...]]:
    """Expand names of slices and of generations to slices, smallest first within a generation.

    Args:
        names: slices as `parse_slice` reads them; a generation, which stands for all of its slices that have a name on
            Cloud TPU; or `all`, which stands for every generation. A text may hold several names, separated by commas.

    Raises:
        ConfigError: there is no name, a name is unknown, or a name is of virtual CPU devices, which have no speed of
            their own.

    Example:
        >>> [[each.name for each in slices] for slices in select_slices(["v6e-16,v6e-8", "v5e-4"])]
        [['v6e-8', 'v6e-16'], ['v5e-4']]
    """
    selected: dict[str, dict[str, Slice]] = {}
    for name in _split(names):
        for each in _slices_of(name):
            selected.setdefault(each.generation.name, {})[each.name] = each
    if not selected:
        raise ConfigError("rank_slices: no slice is named; name generations or slices, for example v5e v6e-8")
    return [tuple(sorted(slices.values(), key=lambda each: each.devices)) for slices in selected.values()]


def parse_prices(texts: Iterable[str]) -> dict[str, float]:
    """Parse prices of a chip-hour: `GENERATION=NUMBER`, several in one text separated by commas.

    Raises:
        ConfigError: the text has another form, a generation is unknown or has two prices, or a price is not positive.

    Example:
        >>> parse_prices(["v6e=2.70,v5p=4.20"])
        {'v6e': 2.7, 'v5p': 4.2}
    """
    prices: dict[str, float] = {}
    for text in _split(texts):
        match = re.fullmatch(r"([^=\s]+)=(\d+(?:\.\d*)?|\.\d+)", text)
        if match is None:
            raise ConfigError(f"price {text!r}: write GENERATION=NUMBER, the price of a chip-hour, {EXAMPLE}")
        name, price = match[1].lower(), float(match[2])
        if prices.setdefault(name, price) != price:
            raise ConfigError(f"price: {name} has two, {prices[name]:g} and {price:g}; leave one of them out")
    check_prices(prices)
    return prices


def check_prices(prices: Mapping[str, float]) -> None:
    """Check that every price is positive, and that its key is a generation.

    Raises:
        ConfigError: a price or a key is not valid.
    """
    for name, price in prices.items():
        if name not in GENERATIONS:
            is_slice = re.split("[-:]", name)[0] in GENERATIONS
            hint = f"a chip has one price in all slices of a generation, {EXAMPLE}" if is_slice else _hint(name, ())
            raise ConfigError(f"price: {name!r} is no generation; {hint}")
        if not 0 < price < math.inf:
            raise ConfigError(f"price of {name} is {price:g}; it must be more than 0, {EXAMPLE}")


def _split(texts: Iterable[str]) -> list[str]:
    return [name for text in texts for name in re.split(r"[,\s]+", text) if name]


def _slices_of(name: str) -> tuple[Slice, ...]:
    """Return the slices that one name stands for."""
    lower = name.lower()
    if lower == ALL:
        return tuple(each for generation in GENERATIONS.values() for each in standard_slices(generation))
    if lower in GENERATIONS:
        return standard_slices(GENERATIONS[lower])
    if NAME.fullmatch(name) is None and standard_spelling(name) is None:
        raise ConfigError(f"rank_slices: {name!r} is no generation and no slice; {_hint(name, (ALL,))}")
    try:
        parsed = parse_slice(name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("hardware.slice", "rank_slices:", 1)) from error
    if parsed.is_cpu:
        raise ConfigError(f"rank_slices: {name} has virtual devices, whose times mean nothing; name TPU slices")
    return (parsed,)


def _hint(name: str, others: Iterable[str]) -> str:
    """Return the generations that `name` means, or that begin with it; otherwise the most similar valid value."""
    lower = name.lower()
    meant = [each for each in GENERATIONS if each.startswith(lower) or GENERATION_SPELLINGS.get(lower) == each]
    return f"did you mean {' or '.join(map(repr, meant))}?" if meant else nearest(lower, [*GENERATIONS, *others])
