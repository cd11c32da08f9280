"""Groups parameters whose paths differ only in numbers, for one table row each.

A decoder's block of six layers has six parameters of each path, which differ in one index.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.plan.file.parameters import ParameterPlan
from shardplan.plan.layer_numbers import run_text, runs_of

INDEX = re.compile(r"\[(\d+)\]")
"""Pattern for an index in a path."""
Indices = tuple[tuple[int, ...], ...]
"""For each index in a text, its values within a group of texts."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with equal axes, type and sharding, whose paths differ only in indices."""

    path: str
    """Path of all parameters of the group, such as segments[0].stacked.layers[0-5].mlp.up_proj.weight."""
    parameters: tuple[ParameterPlan, ...]

    @property
    def first(self) -> ParameterPlan:
        """The first parameter of the group; the others differ only in their paths."""
        return self.parameters[0]

    @property
    def bytes_per_device(self) -> int:
        """Bytes per device of all parameters of the group."""
        return sum(each.bytes_per_device for each in self.parameters)


def group_parameters(parameters: Sequence[ParameterPlan]) -> list[ParameterGroup]:
    """Group equal parameters, in the order of the first of each group.

    >>> def parameter(path, size):
    ...     return ParameterPlan(path, {"embed": size}, "bfloat16", [None], 2 * size)
    >>> sizes = {"layers[0].norm": 8, "layers[1].norm": 8, "layers[2].norm": 4, "norm": 8}
    >>> groups = group_parameters([parameter(path, size) for path, size in sizes.items()])
    >>> [(group.path, group.bytes_per_device) for group in groups]
    [('layers[0-1].norm', 32), ('layers[2].norm', 8), ('norm', 16)]
    """
    rows = [(each.path, (list(each.axes.items()), each.dtype, each.spec, each.bytes_per_device)) for each in parameters]
    return [
        ParameterGroup(path, tuple(parameters[number] for number in numbers))
        for path, numbers in merge_equal_rows(rows)
    ]


def merge_equal_rows(rows: Sequence[tuple[str, object]]) -> list[tuple[str, list[int]]]:
    """Merge rows whose texts differ in one index only; return the text and the row numbers of each merged row.

    Args:
        rows: for each row, its text with indices in brackets, and all other content.

    >>> merge_equal_rows([("a[0].x", 7), ("a[1].x", 7), ("a[2].x", 5), ("b", 7)])
    [('a[0-1].x', [0, 1]), ('a[2].x', [2]), ('b', [3])]
    """
    merged: list[tuple[Indices, list[int]]] = []
    for number, (text, _) in enumerate(rows):
        merged.append((tuple((int(index),) for index in INDEX.findall(text)), [number]))
    keys = [(INDEX.sub("[]", text), repr(shown)) for text, shown in rows]
    most = max((len(indices) for indices, _ in merged), default=0)
    # the last index first: layers of a block are merged before blocks that then have equal layers
    for place in reversed(range(most)):
        merged = _merge(merged, keys, place)
    return [(_text(rows[numbers[0]][0], indices), numbers) for indices, numbers in merged]


def _merge(
    groups: Sequence[tuple[Indices, list[int]]], keys: Sequence[tuple[str, str]], place: int
) -> list[tuple[Indices, list[int]]]:
    """Merge groups of rows that are equal in all but one index.

    Args:
        keys: content of each row without its indices.
    """
    merged: dict[object, tuple[Indices, list[int]]] = {}
    for indices, numbers in groups:
        key = (keys[numbers[0]], indices[:place], indices[place + 1 :])
        if key in merged:
            before, earlier = merged[key]
            indices = (*before[:place], (*before[place], *indices[place]), *before[place + 1 :])
            numbers = [*earlier, *numbers]
        merged[key] = indices, numbers
    return list(merged.values())


def _text(text: str, indices: Indices) -> str:
    """Return a text with a group's values in place of its indices."""
    texts = iter(_index_text(numbers) for numbers in indices)
    return INDEX.sub(lambda _: f"[{next(texts)}]", text)


def _index_text(numbers: Sequence[int]) -> str:
    return ",".join(run_text(first, last) for first, last in runs_of(sorted(numbers)))
