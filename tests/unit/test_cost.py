"""Traffic of training and of several slices, against calculations by hand."""

import pytest

from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model import Contraction, Parameter
from shardplan.plan.cost import Traffic, all_gather, weight_traffic
from shardplan.plan.memory import Workload
from shardplan.runtime.placement import slices_by_axis
from shardplan.verify.read import attended

MESH = {"replica": 2, "data": 4, "model": 1}
WEIGHT = Parameter("mlp.weight", {"layer": 3, "embed": 64, "mlp": 256}, "float32")
BYTES = 64 * 256 * 2
"""One layer of it in the compute type."""


def traffic(params, kind="train", checkpointing="default", routed=()):
    workload = Workload("batch", 8, 128, "float32", "bfloat16", kind, checkpointing)
    use = Contraction("mlp.weight", ("embed",), ("mlp",), routed=routed, repeats=3)
    compute = {"batch": ("replica", "data")}
    return [
        (t.kind, t.mesh_axes, t.bytes, t.count) for t in weight_traffic(use, WEIGHT, workload, params, compute, MESH)
    ]


def test_gradients_of_a_weight_that_rests_cut():
    """Forward, repeated, and for the gradient: three gathers. Summed over `data` in parts, and those over `replica`."""
    gathered = 3 / 4 * BYTES
    assert traffic({"embed": ("data",)}) == [
        ("all-gather", ("data",), 9 * gathered, 9),
        ("reduce-scatter", ("data",), 3 * gathered, 3),
        ("all-reduce", ("replica",), 3 * 2 * 1 / 2 * BYTES / 4, 3),
    ]


def test_gradients_of_a_replicated_weight():
    assert traffic({}) == [("all-reduce", ("replica", "data"), 3 * 2 * 7 / 8 * BYTES, 3)]


def test_what_gradient_checkpointing_repeats():
    """Where everything is kept, the forward pass and its gathers happen once."""
    assert traffic({"embed": ("data",)}, checkpointing="save_all")[0][3] == 2 * 3
    assert traffic({"embed": ("data",)}, kind="eval") == [("all-gather", ("data",), 3 * 3 / 4 * BYTES, 3)]


def test_experts_see_all_tokens_so_that_nothing_is_summed():
    assert traffic({"embed": ("data",)}, routed=("experts",))[1:] == []


def test_slices_talk_over_the_network():
    """2 slices of 4 devices: of 7 parts, one comes over the network, the same for each, and six over links."""
    gather = all_gather(8e9, {"replica": 2, "data": 4, "model": 1}, ("replica", "data"), 1, "")
    assert gather.seconds(parse_slice("v4-16"), MESH) == pytest.approx(7e9 / 9e10)
    assert gather.seconds(parse_slice("2xv4-8"), MESH) == pytest.approx(6e9 / 9e10 + 1e9 / 6.25e9)
    within = Traffic("all-gather", ("data",), 3e9, 1, "")
    assert within.seconds(parse_slice("2xv4-8"), MESH) == pytest.approx(3e9 / 9e10)


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
    assert attended(position, window) == blocks / max(1, position // 512) ** 2
