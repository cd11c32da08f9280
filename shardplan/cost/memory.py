"""Bytes per device of a step under a mapping, by part: what rests, and the largest point of the traced program. Pure.

Nothing is measured here; the rules of what is written to memory are those of `shardplan.program.tasks`, and were
compared with the TPU compiler's peaks (scripts/bench_planner.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardplan.cost.attention import FLOAT32, extra_attention_bytes
from shardplan.cost.lookup import lookup
from shardplan.cost.sharding import ShardingAssignment
from shardplan.program.named_arrays import SECOND, Array
from shardplan.program.tasks import LiveBuffer, Step

FLASH_BLOCK = 1024
"""Side of the block of attention scores that Levanter's flash attention keeps where there is no kernel, tokens."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device; `peak` is the sum of the parts, all alive at the largest point."""

    parameters: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    cast_parameters: float = 0.0
    gathered_weights: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def peak(self) -> float:
        """All parts together."""
        return sum(vars(self).values())


def stored_buffers(step: Step) -> Iterator[LiveBuffer]:
    """What is in memory at every point."""
    yield from (LiveBuffer("parameter", array) for array in step.parameters)
    yield from (LiveBuffer("state", array) for array in step.state)


def buffer_bytes(item: LiveBuffer, layout: ShardingAssignment) -> float:
    """Bytes on one device."""
    array = item.array
    if item.role in ("gathered", "early"):
        gather = layout.gather(array) if item.role == "gathered" or layout.quirks.gathers_early else None
        if gather is None or (item.role == "early" and gather.copies > 1):
            return 0.0
        return gather.copies * gather.bytes
    if item.role == "whole":
        is_scattered = layout.rests(array) and layout.parts(array) > layout.parts(array, layout.compute)
        return layout.bytes(array, layout.compute) if is_scattered else 0.0
    if item.role == "found":
        way = lookup(item.tables[0], array, layout)
        own = layout.bytes(array)
        return way.table + (way.largest if way.largest > 2 * own else 0.0)
    if item.role == "copied":
        return layout.bytes(array) if layout.quirks.copies_stacks else 0.0
    if item.role in ("wide", "summand") and _is_converted(array, layout):
        return layout.bytes(array, layout.params) * FLOAT32 / array.itemsize
    if item.role == "wide":
        return 0.0
    if item.role == "scores":
        return _score_block(array, layout) if layout.quirks.plain_attention else 0.0
    if item.role in ATTENDING:
        return extra_attention_bytes(item, layout)
    if item.role in LATE and layout.quirks.frees_rows == (item.role == "lingering"):
        return 0.0
    if item.role == "sliced":
        return layout.bytes(array, layout.params) if layout.parts(array, layout.params) > layout.parts(array) else 0.0
    return layout.bytes(array, layout.params if item.stays_cut else None)


CUT_AS_RESTING = ("wide", "summand", "sliced")
"""Roles of what may be cut as parameters rest, though it is none."""
ATTENDING = ("keys", "keys_gradient")
"""Roles of what depends on how attention is done."""
LATE = ("lingering", "sliced", "looked_up")
"""Roles of what stays for the gradients of experts: the first where rows are not freed, the others where they are."""


def memory(step: Step, layout: ShardingAssignment) -> Memory:
    """The largest point, by part."""
    resting = _by_part(stored_buffers(step), step, layout)
    points = [_by_part(point, step, layout) for point in step.points]
    return Memory(**resting, **max(points, key=lambda parts: sum(parts.values())))


def _by_part(items: Iterable[LiveBuffer], step: Step, layout: ShardingAssignment) -> dict[str, float]:
    parts: defaultdict[str, float] = defaultdict(float)
    for item in items:
        parts[_part(item, step, layout)] += buffer_bytes(item, layout)
    return dict(parts)


def _part(item: LiveBuffer, step: Step, layout: ShardingAssignment) -> str:
    """The part of `Memory` that an item belongs to."""
    if item.role in PARTS:
        return PARTS[item.role]
    if item.array.weight is not None:
        return "cast_parameters"
    if layout.rests(item.array):
        return "gradients"
    return "logits" if step.vocab in item.array.axes else "activations"


PARTS = {"parameter": "parameters", "state": "optimizer", "gathered": "gathered_weights", "early": "gathered_weights"}


def _is_converted(rows: Array, layout: ShardingAssignment) -> bool:
    """Whether the result of a product by groups is written in float32 first."""
    return layout.quirks.wide_rows and rows.itemsize < FLOAT32 and not layout.rests(rows)


def _score_block(scores: Array, layout: ShardingAssignment) -> float:
    """The block of scores that attention without a kernel works on."""
    size = scores.elements / layout.parts(scores, layout.compute) * FLOAT32
    for name, count in scores.factors:
        if name is not None and name.removesuffix(SECOND) + SECOND in scores.axes:
            size *= min(1.0, FLASH_BLOCK / count)
    return size
