"""Times of collectives, FLOPs of matmuls and blocks under attention masks, against calculations by hand."""

import pytest

from shardplan.cost.collectives import Purpose, Traffic
from shardplan.cost.gspmd import device_cost
from shardplan.cost.matmul import Matmul
from shardplan.cost.roofline import model_flops, transfer_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import CollectiveKind, parse_slice, place_mesh
from shardplan.hardware.multislice import slices_by_axis
from shardplan.model.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.plan.workload import Workload
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout, attended_fraction
from shardplan.program.live_buffers import BufferRole
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind

MESH = {"replica": 2, "data": 4, "model": 1}
LINK, NETWORK, HOP = 4.5e10, 6.25e9, 1e-6
"""Of TPU v4: bytes per second of a link and of a chip's network, one way, and seconds per hop."""


def all_gather(mesh_axes, received, count):
    """All-gathers in which each device receives `received` bytes."""
    return Traffic(CollectiveKind.ALL_GATHER, mesh_axes, received, count, Purpose.WEIGHTS)


def test_all_gather_between_slices_uses_the_network():
    """Of 7 shards from 2 slices of 2x2 devices, each device receives one over the network and six over two links."""
    gather, hardware = all_gather(("replica", "data"), 7e9, 1), parse_slice("2xv4-8")
    seconds = transfer_seconds(gather, place_mesh(hardware, MESH))
    assert seconds == pytest.approx(6e9 / (2 * LINK) + 1e9 / NETWORK + 2 * HOP)
    within = all_gather(("data",), 3e9, 1)
    assert transfer_seconds(within, place_mesh(hardware, MESH)) == pytest.approx(3e9 / (2 * LINK) + 2 * HOP)


def test_all_gather_within_a_slice_uses_links_only():
    """In a cube of 2x2x2 all shards come over the three links of a corner; every execution takes the hops again."""
    gather = all_gather(("replica", "data"), 35e9, 5)
    seconds = transfer_seconds(gather, place_mesh(parse_slice("v4-16"), MESH))
    assert seconds == pytest.approx(5 * (7e9 / (3 * LINK) + 3 * HOP))


@pytest.mark.parametrize(("kind", "factor"), [("eval", 1), ("train", 3)])
def test_model_flops_of_a_step(kind, factor):
    """Two FLOPs per weight and token (the embedding is a lookup), and the causal half of attention's two matmuls."""
    model = build_model(read_config("llama-3.1-405b", None), 4096)
    tokens, layers, width = 16 * 4096, 126, 16384
    weights = 405_853_388_800 - 128256 * width - 253 * width
    expected = 2 * tokens * weights + 2 * tokens * 4097 * width * layers  # a token attends to itself too
    flops = model_flops(model, Workload(kind, 16, 4096, "bfloat16", "bfloat16"))
    assert flops == pytest.approx(factor * expected, rel=1e-9)


def test_model_flops_count_only_the_routed_experts():
    """Mixtral routes each token to 2 of 8 experts."""
    model = build_model(read_config("mixtral-8x7b", None), 1024)
    tokens, embed, layers = 4 * 1024, 4096, 32
    attention = embed * (32 + 8 + 8 + 32) * 128
    weights = layers * (attention + 2 * 3 * embed * 14336 + 8 * embed) + 32000 * embed
    expected = 2 * tokens * weights + 2 * tokens * 1024 * embed * layers
    flops = model_flops(model, Workload("eval", 4, 1024, "bfloat16", "bfloat16"))
    # the weighted sum of the two experts' results comes on top
    assert flops == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("kind", "without_freeing", "with_freeing"), [("train", 7, 3), ("eval", 2, 2)])
def test_live_rows_of_experts(kind, without_freeing, with_freeing):
    """Mixtral, 64 sequences: compiled for tpu7x-64 on mesh 32 x 1 x 2, seven arrays of 2 x 64 x 4096 rows were live at
    the peak of training, and their copies by token; for v5p-64 they were freed before. In the forward pass two are."""
    model = build_model(read_config("mixtral-8x7b", None), 4096)
    step = plan_step(model, Workload(kind, 64, 4096, "float32", "bfloat16"))
    rows = (((None, 2 * 64 * 4096),), (("embed", 4096),))

    def max_live(*roles):
        return max(
            sum(count for buffer, count in point if buffer.array.dims == rows and buffer.role in roles)
            for point in step.points
        )

    freed = (BufferRole.LIVE, BufferRole.FLOAT32_SUMMAND)
    unfreed = (*freed, BufferRole.SUMMED_ROWS, BufferRole.UNFREED_ROWS)
    assert (max_live(*unfreed), max_live(*freed)) == (without_freeing, with_freeing)


def test_matmuls_are_padded_to_tiles():
    """The matrix unit streams at least 8 rows through 128 x 128 tiles of the other matrix; either may stream."""
    assert Matmul(count=3, rows=512, inner=256, columns=384).padded_flops == 3 * 2 * 512 * 256 * 384
    assert Matmul(count=1, rows=512, inner=448, columns=4096).padded_flops == 2 * 512 * 512 * 4096
    assert Matmul(count=1, rows=8192, inner=4096, columns=8).padded_flops == 2 * 8192 * 4096 * 8
    assert Matmul(count=1, rows=2, inner=1, columns=3).padded_flops == 2 * 8 * 128 * 128


def test_matmuls_of_experts():
    """Each row of Mixtral is multiplied by one expert. For the gradient of a parameter every expert multiplies all
    rows, most of them zeros. A matrix-vector product adds up the results of a token's two experts."""
    model = build_model(read_config("mixtral-8x7b", None), 1024)
    step = plan_step(model, Workload("train", 4, 1024, "bfloat16", "bfloat16"))
    assignment = ShardingAssignment({}, {}, {}, step.merged_axes, step.activation_axes)
    contractions = [task for task in step.tasks if task.kind == TaskKind.CONTRACTION]
    matmuls = [(task, device_cost(task, assignment).matmul) for task in contractions]
    flops = 32 * 2 * (2 * 4 * 1024) * 4096 * 14336
    forward = [m for task, m in matmuls if task.groups > 1 and any(a.weight for a in task.operands)]
    gradients = [m for task, m in matmuls if task.groups > 1 and not any(a.weight for a in task.operands)]
    assert {m.flops for m in forward} == {flops} and {m.flops for m in gradients} == {8 * flops}
    assert Matmul(32 * 4 * 1024, rows=4096, inner=2, columns=1) in [m for task, m in matmuls if task.batched]


@pytest.mark.parametrize(
    ("slices", "sizes", "parts"),
    [(1, (2, 4, 1), (1, 1, 1)), (2, (2, 4, 1), (2, 1, 1)), (4, (2, 4, 1), (2, 2, 1)), (3, (1, 6, 2), (1, 3, 1))],
)
def test_number_of_slices_along_each_mesh_axis(slices, sizes, parts):
    assert slices_by_axis(slices, dict(zip(MESH, sizes, strict=True))) == parts


def test_slices_that_do_not_divide_the_mesh():
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
def test_attended_blocks_of_one_device(position, window, blocks):
    assert (
        attended_fraction(SequenceLayout(position), Pattern(True, window=window), True)
        == blocks / max(1, position // 512) ** 2
    )


def test_attended_blocks_with_gathered_keys():
    """Of 2048 positions in blocks of 512, on two devices, the last device computes 3 + 4 of its 2 x 4 blocks."""
    causal, window = Pattern(causal=True), Pattern(causal=True, window=513)
    assert attended_fraction(SequenceLayout(2048, 2), causal, gathers=True) == (3 + 4) / 8
    assert attended_fraction(SequenceLayout(2048, 2), window, gathers=True) == (2 + 2) / 8
    assert attended_fraction(SequenceLayout(2048, 8), causal, gathers=True) == 8 / 8


def test_attended_blocks_of_a_ring():
    """Of 4096 positions on two devices, the first waits for the other at the second hop, but not in zigzag order."""
    causal = Pattern(causal=True)
    assert attended_fraction(SequenceLayout(4096, 2), causal, gathers=False) == ((1 + 2 + 3 + 4) + 4 * 4) / 32
    # of quarters 0 and 3, or 1 and 2: for its own keys each device computes two diagonals and one full quarter, and for
    # the other device's keys 8 of 16 blocks
    assert attended_fraction(SequenceLayout(4096, 2, kind="zigzag"), causal, gathers=False) == (10 + 8) / 32
    assert attended_fraction(SequenceLayout(4096, 2, kind="zigzag"), causal, gathers=True) == (10 + 8) / 32
