"""Memory, work and traffic of Mixtral's experts, against calculations by hand and what the TPU compiler made of them.

Sequences of 4096 tokens; each token has a row for each of its 2 experts.
"""

from collections import defaultdict
from functools import cache

import pytest

from shardplan.cost.collectives import Purpose
from shardplan.cost.gspmd import device_cost
from shardplan.cost.matmul import Matmul
from shardplan.cost.memory import estimate_memory
from shardplan.cost.roofline import model_flops
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.live_buffers import BufferRole
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind

ROWS = 2 * 64 * 4096
"""Rows of 64 sequences."""
TENSOR_PARALLEL = {axis: ("model",) for axis in ("mlp", "heads", "kv_head", "vocab")}


@cache
def traced_step(kind, batch=64):
    """The step of `batch` sequences."""
    model = build_model(read_config("mixtral-8x7b", None, LEVANTER), 4096)
    return plan_step(model, Workload(kind, batch, 4096, "float32" if kind == "train" else "bfloat16", "bfloat16"))


def assign(step, sizes, compute, params):
    mesh = dict(zip(("replica", "data", "model"), sizes, strict=True))
    return ShardingAssignment(mesh, compute, params, step.merged_axes, step.activation_axes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "without_freeing", "with_freeing"), [("train", 7, 3), ("eval", 2, 2)])
def test_live_rows_of_experts(kind, without_freeing, with_freeing):
    """Mixtral, 64 sequences: compiled for tpu7x-64 on mesh 32 x 1 x 2, seven arrays of 2 x 64 x 4096 rows were live at
    the peak of training, and their copies by token; for v5p-64 they were freed before. In the forward pass two are."""
    step = traced_step(kind)
    rows = (((None, ROWS),), (("embed", 4096),))

    def max_live(*roles):
        return max(
            sum(count for buffer, count in point if buffer.array.dims == rows and buffer.role in roles)
            for point in step.points
        )

    unfreed = max_live(BufferRole.LIVE, BufferRole.SUMMED_ROWS, BufferRole.UNFREED_ROWS)
    assert (unfreed, max_live(BufferRole.LIVE)) == (without_freeing, with_freeing)


@pytest.mark.parametrize(
    ("sizes", "compute", "params", "peak_gib"),
    [
        # two arrays of rows x mlp: their product is written over one of them
        ((1, 64, 1), {"batch": ("data",)}, {"embed": ("data",)}, 29.52),
        # rows x embed, before and after each token's own are selected; experts take slices of a sixteenth of embed
        (
            (2, 16, 2),
            {"batch": ("replica", "data"), **TENSOR_PARALLEL},
            {
                **TENSOR_PARALLEL,
                "mlp": ("model", "replica"),
                "vocab": ("model", "replica"),
                "embed": ("data",),
                "head_size": ("replica",),
            },
            9.64,
        ),
    ],
)
def test_rows_are_sliced_and_overwritten(sizes, compute, params, peak_gib):
    """Peaks compiled for v5e-64."""
    step = traced_step("eval")
    assert estimate_memory(step, assign(step, sizes, compute, params)).peak / GIB == pytest.approx(peak_gib, rel=0.03)


@pytest.mark.slow
def test_traffic_of_training():
    """GiB received, compiled for 32 sequences on v5p-64.

    Over all devices are added up: results of experts, the sum of the gradients of both their inputs, gradients of rows,
    and gradients of tokens. Tokens are gathered in both forward passes; in the backward pass their gradients are,
    rather than the rows that are products with them. Routers add 0.1.
    """
    step = traced_step("train", batch=32)
    stored = {"vocab": ("model", "replica"), "mlp": ("model", "replica"), "head_size": ("replica",)}
    assignment = assign(step, (16, 1, 2), {"batch": ("replica",), **TENSOR_PARALLEL}, {**TENSOR_PARALLEL, **stored})
    received = defaultdict[Purpose, float](float)
    for task in step.tasks:
        for each in device_cost(task, assignment).traffic:
            if task.groups > 1 or each.purpose != Purpose.PARTIAL_SUMS:
                received[each.purpose] += each.bytes / GIB
    assert received[Purpose.PARTIAL_SUMS] == pytest.approx(372)
    assert received[Purpose.SUMS_OVER_DEVICES] == pytest.approx(124 + 62, abs=0.2)
    assert received[Purpose.REPLICATION] == pytest.approx(90, abs=0.2)


def test_rows_out_of_bounds_are_filled_in_a_pass():
    """The kernel of experts reads rows from memory, so that a lookup and the pass that fills them both write them."""
    tasks = [task for task in traced_step("eval").tasks if "permute" in task.label and "unpermute" not in task.label]
    rows = (((None, ROWS),), (("embed", 4096),))
    writers = [task.kind for task in tasks if any(array.dims == rows for array in task.results)]
    assert writers == [TaskKind.LOOKUP, TaskKind.ELEMENTWISE]


@pytest.mark.slow
def test_matmuls_of_experts():
    """Each row of Mixtral is multiplied by one expert, and is in the gradient of one expert's parameters.

    A matrix-vector product adds up the results of a token's two experts.
    """
    model = build_model(read_config("mixtral-8x7b", None, LEVANTER), 1024)
    step = plan_step(model, Workload("train", 4, 1024, "bfloat16", "bfloat16"))
    assignment = ShardingAssignment({}, {}, {}, step.merged_axes, step.activation_axes)
    contractions = [task for task in step.tasks if task.kind == TaskKind.CONTRACTION]
    matmuls = [(task, device_cost(task, assignment).matmul) for task in contractions]
    flops = 32 * 2 * (2 * 4 * 1024) * 4096 * 14336
    grouped = [m for task, m in matmuls if task.groups > 1]
    gradients = [m for task, m in matmuls if task.groups > 1 and not any(a.weight for a in task.operands)]
    assert {m.flops for m in grouped} == {flops}
    assert {(m.count, m.inner) for m in gradients} == {(32 * 8, 2 * 4 * 1024 / 8)}
    assert Matmul(32 * 4 * 1024, rows=4096, inner=2, columns=1) in [m for task, m in matmuls if task.batched]


def test_model_flops_count_only_the_routed_experts():
    """Mixtral routes each token to 2 of 8 experts."""
    model = build_model(read_config("mixtral-8x7b", None, LEVANTER), 1024)
    tokens, embed, layers = 4 * 1024, 4096, 32
    attention = embed * (32 + 8 + 8 + 32) * 128
    weights = layers * (attention + 2 * 3 * embed * 14336 + 8 * embed) + 32000 * embed
    expected = 2 * tokens * weights + 2 * tokens * 1024 * embed * layers
    flops = model_flops(model, Workload("eval", 4, 1024, "bfloat16", "bfloat16"))
    # the weighted sum of the two experts' results comes on top
    assert flops == pytest.approx(expected, rel=1e-3)
