"""Describes a subset of a model's layers in words, such as `every 6th layer from 5 (10 of 62)`."""

from collections.abc import Sequence

from shardplan.plan.file.details import AttentionCost

MIN_PERIODS = 3
"""Least number of equally spaced layers that a text describes by their distance."""
MAX_RUNS = 4
"""Maximum number of runs of layers that are named; `...` stands for the others."""


def layers_by_kind(costs: Sequence[AttentionCost]) -> dict[str, str]:
    """Return kind of attention -> its layers in words, or its number of calls if the layers are unknown.

    >>> from types import SimpleNamespace
    >>> local = SimpleNamespace(kind="window 512", layers=4, layer_numbers=[0, 1, 3, 4])
    >>> full = SimpleNamespace(kind="full", layers=2, layer_numbers=[2, 5])
    >>> layers_by_kind([local, full])
    {'window 512': 'layers 0-1, 3-4 (4 of 6)', 'full': 'layers 2, 5 (2 of 6)'}
    """
    total = sum(each.layers for each in costs)
    return {
        each.kind: layers_text(each.layer_numbers, total) if each.layer_numbers else f"{each.layers} of {total} calls"
        for each in costs
    }


def layers_text(numbers: Sequence[int], total: int) -> str:
    """Describe given layers (sorted numbers from 0) of a model with `total` layers.

    >>> layers_text([5, 11, 17, 23], 26)
    'every 6th layer from 5 (4 of 26)'
    >>> layers_text([0, 1, 3, 4, 6, 7, 9], 10)
    'all but every 3rd layer from 2 (7 of 10)'
    >>> layers_text([0, 1, 2, 5, 7, 8], 10)
    'layers 0-2, 5, 7-8 (6 of 10)'
    """
    if len(numbers) == total:
        return f"all {total} layers"
    others = sorted(set(range(total)).difference(numbers))
    of_all = f"({len(numbers)} of {total})"
    for prefix, layers in (("", numbers), ("all but ", others)):
        period = _period(layers, total)
        if period is not None:
            return f"{prefix}every {_ordinal(period)} layer from {layers[0]} {of_all}"
    runs = runs_of(numbers)
    texts = [run_text(first, last) for first, last in runs[:MAX_RUNS]]
    rest = ", ..." if len(runs) > MAX_RUNS else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}{rest} {of_all}"


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each run of consecutive numbers.

    >>> runs_of([0, 1, 2, 5, 7, 8])
    [(0, 2), (5, 5), (7, 8)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def run_text(first: int, last: int) -> str:
    """Format a run of numbers as `0-5`, or a single one as `5`.

    >>> run_text(0, 5), run_text(5, 5)
    ('0-5', '5')
    """
    return f"{first}-{last}" if last > first else str(first)


def _period(layers: Sequence[int], total: int) -> int | None:
    """Return the distance between equally spaced layers that continue to the model's end; None for other layers."""
    if len(layers) < MIN_PERIODS:
        return None
    period = layers[1] - layers[0]
    is_periodic = period > 1 and list(layers) == list(range(layers[0], total, period))
    return period if is_periodic else None


def _ordinal(number: int) -> str:
    """Format a number as 2nd, 3rd, 4th and so on."""
    is_teen = number % 100 in (11, 12, 13)
    ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
