"""Tables of the kinds of attention of a model whose layers differ: the layers, method and cost of each kind."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.plan.attention_plan import AttentionPlan, SparseKernel, Strategy
from shardplan.plan.file.details import AttentionCost
from shardplan.plan.layer_numbers import layers_by_kind
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.report.text import make_table


@dataclass(frozen=True)
class AttentionRow:
    """One kind of attention, as a row of the table."""

    layers: str
    """Layers with this kind, in words."""
    kind: str
    """Name of the kind: its mask and sizes."""
    method: str
    cost: AttentionCost
    seconds: float
    """Seconds of this kind in a step: compute, and collectives that do not overlap with compute."""
    part: float
    """Fraction of the step's time."""
    part_of_flops: float
    """Fraction of the model's FLOPs in a step."""


def attention_rows(plan: Plan) -> list[AttentionRow]:
    """Return a row for each kind of attention, most work first; no rows if all layers have the same kind.

    There are also no rows for a Plan of an older version, or without details.
    """
    costs = plan.details.attention if plan.details is not None else []
    if len(costs) < 2:
        return []
    layers, rows = layers_by_kind(costs), []
    for cost in costs:
        seconds = cost.compute_seconds + cost.exposed_seconds
        rows.append(
            AttentionRow(
                layers=layers[cost.kind],
                kind=cost.kind,
                method=method_text(plan.attention.of(cost.kind)),
                cost=cost,
                seconds=seconds,
                part=seconds / plan.cost.step_seconds,
                part_of_flops=cost.model_flops / plan.cost.model_flops if plan.cost.model_flops else 0.0,
            )
        )
    return rows


def method_text(method: AttentionPlan) -> str:
    """Describe how attention is computed, such as `ulysses 4 x ring 2 zigzag (splash)`."""
    match method.strategy:
        case Strategy.NONE:
            text = "unsharded" if isinstance(method.kernel, SparseKernel) else "Levanter's own"
        case Strategy.ALL_GATHER:
            text = f"all-gather {method.ring * method.ulysses}"
        case Strategy.RING:
            text = f"ring {method.ring}"
        case Strategy.ULYSSES:
            text = f"ulysses {method.ulysses}"
        case Strategy.HYBRID:
            text = f"ulysses {method.ulysses} x ring {method.ring}"
    order = f" {method.layout}" if method.layout != SequenceOrder.CONTIGUOUS else ""
    return f"{text}{order} ({method.kernel})"


def attention_tables(plan: Plan) -> Iterator[Table]:
    """Yield tables of the kinds of attention, the widest first; nothing if all layers have the same kind."""
    rows = attention_rows(plan)
    if not rows:
        return
    title = "Attention by kind (layers from 0)"
    numbers = ("s a step", "PFLOPs", "GiB live", "of step", "of FLOPs", "GiB received")
    for count in (len(numbers), 3):
        table = make_table(title, ("layers", "attention", "method"), numbers[:count])
        for row in rows:
            table.add_row(*map(Text, (row.layers, row.kind, row.method, *_numbers(row)[:count])))
        yield table
    narrow = make_table(title, ("layers · attention · method",), numbers[:3])
    for row in rows:
        narrow.add_row(*map(Text, (f"{row.layers} · {row.kind} · {row.method}", *_numbers(row)[:3])))
    yield narrow


def _numbers(row: AttentionRow) -> list[str]:
    """Format the numbers in a row of the table."""
    return [
        f"{row.seconds:.3g}",
        f"{row.cost.model_flops / 1e15:,.4g}",
        f"{row.cost.live_bytes / GIB:,.3f}",
        f"{row.part:.1%}",
        f"{row.part_of_flops:.1%}",
        f"{row.cost.received_bytes / GIB:,.3f}",
    ]
