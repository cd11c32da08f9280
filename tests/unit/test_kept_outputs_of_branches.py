"""What layers with Native Sparse Attention keep for their gradients: in traced layers, and in the priced step."""

import json
import math
import re
from collections import Counter

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from jax.ad_checkpoint import print_saved_residuals

from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.decoder import NativeSparseAttention, SelectedMethod
from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.model.gradient_checkpointing.activation_names import context_named_by_kernel
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, SparseKernel
from shardplan.plan.workload.workload import Workload
from shardplan.program.live_buffers import BufferRole
from shardplan.program.step_trace import plan_step

LAYERS, BATCH, POSITIONS, GROUPS, HEADS, SIZE = 2, 8, 512, 2, 8, 16
KEYS = json.loads((ROOT / "configs" / "nsa-tiny.json").read_text()) | {
    "num_attention_heads": GROUPS * HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
"""Kernels of the compressed branch pad no group of 8 heads."""
ROWS = BATCH * POSITIONS * GROUPS * HEADS


@pytest.fixture(scope="module")
def model():
    return build_model(dict(KEYS), POSITIONS)


@pytest.fixture
def kept_by_layer(model, capsys):
    """What a layer keeps for its gradients, as lines such as "f32[8,512] output of cond from layer.py"."""

    def trace(method, policy):
        config = next(sparse_attentions(model.config.segments)).sizes
        made = eqx.filter_eval_shape(lambda: NativeSparseAttention.init(config, key=jax.random.key(0)))
        narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), made)
        shape = jax.ShapeDtypeStruct((BATCH, POSITIONS, config.embed), jnp.bfloat16)
        x = hax.NamedArray(shape, (hax.Axis("batch", BATCH), hax.Axis("position", POSITIONS), config.Embed))

        def loss(layer, x):
            return hax.sum(layer(x, method).astype(jnp.float32)).scalar()

        print_saved_residuals(jax.checkpoint(loss, policy=policy), narrow, x)
        return capsys.readouterr().out.splitlines()

    return trace


def priced_stacks(model, policy, kernel=SparseKernel.KERNEL):
    """(Role, axes of a head) -> the most bytes that the priced step keeps for all layers, on one device."""
    step = plan_step(model, Workload("train", BATCH, POSITIONS, "bfloat16", gradient_checkpointing=policy).resolve())
    mesh, attention = {"replica": 1, "data": 1, "model": 1}, AttentionPlan(kernel=kernel)
    assignment = ShardingAssignment(
        mesh, {}, {}, step.merged_axes, step.activation_axes, CompilerQuirks(), attention
    )  # fmt: skip
    stacks = Counter()
    for point in step.points:
        here = Counter()
        for buffer, count in point:
            axes = buffer.array.logical_axes
            if axes[:4] == ("layers", "batch", "position", "kv_head"):
                here[buffer.role, axes[4:]] += count * round(buffer_bytes(buffer, assignment))
        stacks |= here
    return stacks


def sizes_of(lines, pattern):
    """Bytes of the arrays of those lines that have the pattern behind type and shape, with the pattern's group."""
    for line in lines:
        if found := re.match(rf"([a-z]+)(\d+)\[([\d,]+)\] {pattern}", line):
            yield math.prod(map(int, found[3].split(","))) * int(found[2]) // 8, found


def named(lines):
    """Name -> bytes, of what has a name."""
    return {found[4]: size for size, found in sizes_of(lines, r"named '(\w+)'")}


@pytest.mark.parametrize("method", SelectedMethod)
def test_with_the_context_nothing_of_a_branch_is_kept(model, kept_by_layer, method):
    """No output and no log-sum-exp; also where a plan leaves the name of the context to kernels of other attention."""
    policy = jax.checkpoint_policies.save_only_these_names("context", "selected_blocks")
    lines = kept_by_layer(method, policy)
    of_tokens = [line for line in lines if "from the argument" not in line and "from a constant" not in line]
    kept = named(of_tokens)
    assert len(of_tokens) == len(kept) == 2
    with context_named_by_kernel():
        assert named(kept_by_layer(method, policy)) == kept
    context, blocks = (BufferRole.LIVE, ("q_heads_per_group", "head_size")), (BufferRole.LIVE, ())
    assert priced_stacks(model, "default+context", SparseKernel(method.value)) == {
        context: LAYERS * kept["context"], blocks: LAYERS * kept["selected_blocks"],
    }  # fmt: skip


def test_without_checkpointing_kernels_keep_outputs_and_log_sums(model, kept_by_layer):
    """Of three branches, in tiles; the context and the blocks beside them."""
    lines = kept_by_layer(SelectedMethod.KERNEL, jax.checkpoint_policies.everything_saveable)
    by_kernels = Counter()
    # a kernel is a choice between platforms
    for size, found in sizes_of(lines, "output of cond from .*/attention/sparse/"):
        by_kernels[found[1] + found[2]] += size
    assert by_kernels == {"bf16": 3 * ROWS * SIZE * 2, "f32": 3 * ROWS * 4}
    stacks, branches = priced_stacks(model, "save_all"), ("q_heads_per_group",)
    assert stacks[BufferRole.LOG_SUM_EXP_OF_BLOCKS, branches] == LAYERS * by_kernels["f32"]
    by_xla = priced_stacks(model, "save_all", SparseKernel.GATHERED_BLOCKS)
    assert by_xla[BufferRole.LOG_SUM_EXP_OF_BLOCKS, branches] == 0
    # outputs of branches, queries and the context have the same logical axes
    of_heads = stacks[BufferRole.LIVE, ("q_heads_per_group", "head_size")]
    assert of_heads == LAYERS * (by_kernels["bf16"] + 2 * ROWS * SIZE * 2)


def test_attention_is_computed_again_under_a_policy_that_keeps_the_context(model):
    """Not so where everything is kept."""
    for policy, calls in (("default", 3), ("default+context", 3), ("save_all", 2)):
        workload = Workload("train", BATCH, POSITIONS, gradient_checkpointing=policy).resolve()
        tasks = plan_step(model, workload).sparse_tasks
        assert [task.is_sparse_gradient for task in tasks] == [False] * (calls - 1) + [True]
