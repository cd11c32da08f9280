"""Times of collectives, FLOPs of matmuls and blocks under attention masks, against calculations by hand."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shardplan.cost.calibration import Calibration, TrainingFactors, load_calibration
from shardplan.cost.collectives import Purpose, Traffic
from shardplan.cost.gspmd import device_cost
from shardplan.cost.matmul import Matmul
from shardplan.cost.roofline import (
    compute_seconds,
    exposed_host_copies,
    model_flops,
    seconds_beside,
    transfer_seconds,
)
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import CollectiveKind, parse_slice, place_mesh
from shardplan.hardware.multislice import slices_by_axis
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout, attended_fraction
from shardplan.program.step_trace import plan_step

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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "factor"), [("eval", 1), ("train", 3)])
def test_model_flops_of_a_step(kind, factor):
    """Two FLOPs per weight and token (the embedding is a lookup), and the causal half of attention's two matmuls."""
    model = build_model(read_config("llama-3.1-405b", None), 4096)
    tokens, layers, width = 16 * 4096, 126, 16384
    weights = 405_853_388_800 - 128256 * width - 253 * width
    expected = 2 * tokens * weights + 2 * tokens * 4097 * width * layers  # a token attends to itself too
    flops = model_flops(model, Workload(kind, 16, 4096, "bfloat16", "bfloat16"))
    assert flops == pytest.approx(factor * expected, rel=1e-9)


def test_late_copies_are_those_of_the_best_order():
    """Copies of a loop run one after the other; no order makes the last one less late. Loops add up."""
    hardware, chooser = parse_slice("v5e-16"), random.Random(0)
    calibration = load_calibration(hardware.generation.name)
    for _ in range(20):
        by_loop = {None: [(0.0, chooser.random())]}
        for loop in (7, 8):
            by_loop[loop] = [(chooser.choice((0.0, 1e13, 3e14, 6e14)), chooser.random()) for _ in range(4)]
        copies, expected = [], 0.0
        for loop, members in by_loop.items():
            copies += [(SimpleNamespace(loop=loop, executions=1, layer_flops=flops), s) for flops, s in members]
            orders = itertools.permutations((seconds_beside(flops, hardware, calibration), s) for flops, s in members)
            expected += min(lateness(order) for order in orders)
        exposed = [*exposed_host_copies(copies, hardware, calibration)]
        assert sum(exposed) == pytest.approx(expected, rel=1e-9)
        assert all(0 <= late <= seconds for late, (_, seconds) in zip(exposed, copies, strict=True))


def lateness(order):
    """Return by how much the latest of transfers is late, each with its deadline and its seconds."""
    now = late = 0.0
    for due, seconds in order:
        now += seconds
        late = max(late, now - due)
    return late


def test_matmuls_are_padded_to_tiles():
    """The matrix unit streams at least 8 rows through 128 x 128 tiles of the other matrix; either may stream."""
    assert Matmul(count=3, rows=512, inner=256, columns=384).padded_flops == 3 * 2 * 512 * 256 * 384
    assert Matmul(count=1, rows=512, inner=448, columns=4096).padded_flops == 2 * 512 * 512 * 4096
    assert Matmul(count=1, rows=8192, inner=4096, columns=8).padded_flops == 2 * 8192 * 4096 * 8
    assert Matmul(count=1, rows=2, inner=1, columns=3).padded_flops == 2 * 8 * 128 * 128


@pytest.mark.parametrize(("size", "factor"), [(None, 1), (256, 1), (192, 1), (128, 2), (64, 2)])
def test_heads_that_are_narrower_than_the_matrix_unit(size, factor):
    """Heads are padded to lanes, and one at a time fills the columns of a unit."""
    matmul = Matmul(count=1, rows=512, inner=4096, columns=1024, head_size=size)
    assert matmul.unit_flops(256) == factor * matmul.padded_flops
    assert matmul.unit_flops(128) == matmul.padded_flops


def test_matmuls_with_heads_before_the_last_axis_of_their_weight():
    """Levanter has projections to heads as {kv_head, head_size, embed}, the output's as {embed, heads, head_size}."""
    step = plan_step(build_model(read_config("llama-3.2-1b", None), 1024), Workload("train", 8, 1024))
    narrow = {task.label.split(".")[-2] for task in step.tasks if task.kind == "contraction" and task.head_axis}
    others = {task.label.split(".")[-2] for task, _ in step.weight_matmuls if not task.head_axis}
    assert narrow == {"q_proj", "k_proj", "v_proj"}
    assert others >= {"o_proj", "gate_proj", "up_proj", "down_proj"} and not others & narrow


def test_trainings_have_factors_of_their_own():
    factors = Calibration(
        products=1.1, elementwise=3.0, copying=9.0, training=TrainingFactors(1.2, 2.0, weight_passes=1)
    )
    model = build_model(read_config("llama-3.2-1b", None), 1024)
    evaluation, training = (plan_step(model, Workload(kind, 8, 1024)) for kind in ("eval", "train"))
    assert factors.of(evaluation) is factors
    of_training = factors.of(training)
    assert of_training == replace(factors, products=1.2, elementwise=2.0, weight_passes=1)
    task, weight = next(pair for pair in training.weight_matmuls if "down_proj" in pair[0].label)
    assignment = ShardingAssignment({"data": 4}, {"batch": ("data",)}, {"embed": ("data",)}, {}, ("batch", "position"))
    cost = device_cost(task, assignment)
    assert cost.weight_bytes == task.executions * weight.elements * weight.itemsize  # gathered
    of_all, without = (
        compute_seconds(task, cost, parse_slice("v5p-8"), replace(of_training, weight_passes=passes))
        for passes in (1, 0)
    )
    assert of_all - without == pytest.approx(2.0 * cost.weight_bytes / 2.765e12)


@pytest.mark.parametrize(
    ("slices", "sizes", "parts"),
    [(1, (2, 4, 1), (1, 1, 1)), (2, (2, 4, 1), (2, 1, 1)), (4, (2, 4, 1), (2, 2, 1)), (3, (1, 6, 2), (1, 3, 1))],
)
def test_number_of_slices_along_each_mesh_axis(slices, sizes, parts):
    assert slices_by_axis(slices, dict(zip(MESH, sizes, strict=True))) == parts


def test_slices_that_do_not_divide_the_mesh(raises_message):
    with raises_message(ConfigError):
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
