"""Times of transfers and of the model's products, against calculations by hand."""

import pytest

from shardplan.cost.gspmd import Traffic, device_cost
from shardplan.cost.matmul import Product
from shardplan.cost.roofline import model_flops, transfer_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.hardware.multislice import slices_by_axis
from shardplan.model import build_model, read_config
from shardplan.plan.workload import Workload
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout, attended
from shardplan.program.step_trace import plan_step

MESH = {"replica": 2, "data": 4, "model": 1}


LINK, NETWORK, HOP = 4.5e10, 6.25e9, 1e-6
"""Of v4: bytes per second of a link and of a chip's network, one way, and seconds of a hop."""


def test_slices_talk_over_the_network():
    """Of 7 parts from 2 slices of 2x2 devices one comes over the network, the same for each, and six over two links."""
    gather, hardware = Traffic("all-gather", ("replica", "data"), 7e9, 1, ""), parse_slice("2xv4-8")
    seconds = transfer_seconds(gather, hardware, MESH)
    assert seconds == pytest.approx(6e9 / (2 * LINK) + 1e9 / NETWORK + 2 * HOP)
    within = Traffic("all-gather", ("data",), 3e9, 1, "")
    assert transfer_seconds(within, hardware, MESH) == pytest.approx(3e9 / (2 * LINK) + 2 * HOP)


def test_one_slice_has_links_alone():
    """The same in a cube of 2x2x2, over the three links of a corner; every execution takes the hops again."""
    gather = Traffic("all-gather", ("replica", "data"), 35e9, 5, "")
    seconds = transfer_seconds(gather, parse_slice("v4-16"), MESH)
    assert seconds == pytest.approx(5 * (7e9 / (3 * LINK) + 3 * HOP))


@pytest.mark.parametrize(("kind", "factor"), [("eval", 1), ("train", 3)])
def test_products_that_a_step_needs(kind, factor):
    """Two FLOPs a weight and token (the embedding is a lookup), and the causal half of attention's two products."""
    model = build_model(read_config("configs/models/llama-3.1-405b.json", None), 4096)
    tokens, layers, width = 16 * 4096, 126, 16384
    weights = 405_853_388_800 - 128256 * width - 253 * width
    expected = 2 * tokens * weights + 2 * tokens * 4097 * width * layers  # a token attends to itself too
    found = model_flops(model, Workload("batch", 16, 4096, "bfloat16", "bfloat16", kind))
    assert found == pytest.approx(factor * expected, rel=1e-9)


def test_experts_count_as_often_as_tokens_use_them():
    """Mixtral: 2 of 8 experts a token."""
    model = build_model(read_config("configs/models/mixtral-8x7b.json", None), 1024)
    tokens, embed, layers = 4 * 1024, 4096, 32
    attention = embed * (32 + 8 + 8 + 32) * 128
    weights = layers * (attention + 2 * 3 * embed * 14336 + 8 * embed) + 32000 * embed
    expected = 2 * tokens * weights + 2 * tokens * 1024 * embed * layers
    found = model_flops(model, Workload("batch", 4, 1024, "bfloat16", "bfloat16"))
    # and the weighted sum of what the two experts say
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("kind", "kept", "freed"), [("train", 7, 3), ("eval", 2, 2)])
def test_training_experts_keeps_all_rows(kind, kept, freed):
    """Mixtral, 64 sequences: compiled for tpu7x-64 on mesh 32 x 1 x 2 seven arrays of 2 x 64 x 4096 rows were in memory
    at the peak, and their copies by token; for v5p-64 they were freed before. Forward two."""
    model = build_model(read_config("configs/models/mixtral-8x7b.json", None), 4096)
    step = plan_step(model, Workload("batch", 64, 4096, "float32", "bfloat16", kind))
    rows = (((None, 2 * 64 * 4096),), (("embed", 4096),))

    def most(*roles):
        return max(sum(item.array.dims == rows for item in point if item.role in roles) for point in step.points)

    assert (most("kept", "summand", "lingering"), most("kept", "summand")) == (kept, freed)


def test_products_fill_tiles():
    """The matrix unit takes 8 rows at least, with 128 x 128 numbers of the other matrix; either may be the other."""
    assert Product(count=3, rows=512, inner=256, columns=384).filled_flops == 3 * 2 * 512 * 256 * 384
    assert Product(count=1, rows=512, inner=448, columns=4096).filled_flops == 2 * 512 * 512 * 4096
    assert Product(count=1, rows=8192, inner=4096, columns=8).filled_flops == 2 * 8192 * 4096 * 8
    assert Product(count=1, rows=2, inner=1, columns=3).filled_flops == 2 * 8 * 128 * 128


def test_products_of_experts():
    """Mixtral's rows meet one expert each; for the gradient of a parameter every expert takes all rows, most as zeros;
    and what a token's two experts say is added up by a product with a vector."""
    model = build_model(read_config("configs/models/mixtral-8x7b.json", None), 1024)
    step = plan_step(model, Workload("batch", 4, 1024, "bfloat16", "bfloat16", "train"))
    layout = ShardingAssignment({}, {}, {}, step.merged, step.activation_axes)
    products = [(task, device_cost(task, layout).product) for task in step.tasks if task.kind == "contraction"]
    one = 32 * 2 * (2 * 4 * 1024) * 4096 * 14336
    forward = [p for task, p in products if task.groups > 1 and any(a.weight for a in task.operands)]
    gradients = [p for task, p in products if task.groups > 1 and not any(a.weight for a in task.operands)]
    assert {p.flops for p in forward} == {one} and {p.flops for p in gradients} == {8 * one}
    assert Product(32 * 4 * 1024, rows=4096, inner=2, columns=1) in [p for task, p in products if task.batched]


@pytest.mark.parametrize(
    ("slices", "sizes", "parts"),
    [(1, (2, 4, 1), (1, 1, 1)), (2, (2, 4, 1), (2, 1, 1)), (4, (2, 4, 1), (2, 2, 1)), (3, (1, 6, 2), (1, 3, 1))],
)
def test_where_slices_lie(slices, sizes, parts):
    assert slices_by_axis(slices, dict(zip(MESH, sizes, strict=True))) == parts


def test_slices_that_no_axis_can_cross():
    with pytest.raises(ConfigError, match="the 3 slices do not divide replica x data = 8"):
        slices_by_axis(3, MESH)


@pytest.mark.parametrize(
    ("position", "window", "blocks"),
    [
        (512, None, 1),
        (2048, None, 1 + 2 + 3 + 4),
        (2048, 513, 1 + 2 + 2 + 2),  # the first query of a block sees one key block back
        (2048, 514, 1 + 2 + 3 + 3),
        (2048, 1, 4),
        (256, None, 1),
    ],
)
def test_blocks_that_a_mask_leaves(position, window, blocks):
    assert (
        attended(SequenceLayout(position), Pattern(True, window=window), True) == blocks / max(1, position // 512) ** 2
    )


def test_blocks_of_the_last_part():
    """Of 2048 positions in blocks of 512, cut in two: the last half computes 3 + 4 of its 2 x 4 blocks."""
    causal, window = Pattern(causal=True), Pattern(causal=True, window=513)
    assert attended(SequenceLayout(2048, 2), causal, gathers=True) == (3 + 4) / 8
    assert attended(SequenceLayout(2048, 2), window, gathers=True) == (2 + 2) / 8
    assert attended(SequenceLayout(2048, 8), causal, gathers=True) == 8 / 8


def test_blocks_hop_by_hop():
    """Of 4096 positions in two parts: the first half waits at the second hop for the other, but not in a zigzag."""
    causal = Pattern(causal=True)
    assert attended(SequenceLayout(4096, 2), causal, gathers=False) == ((1 + 2 + 3 + 4) + 4 * 4) / 32
    # of quarters 0 and 3, 1 and 2: at home both 2 diagonals and one whole, and 8 of 16 blocks of the other's
    assert attended(SequenceLayout(4096, 2, kind="zigzag"), causal, gathers=False) == (10 + 8) / 32
    assert attended(SequenceLayout(4096, 2, kind="zigzag"), causal, gathers=True) == (10 + 8) / 32
