"""Gradient checkpointing keeps the blocks that queries select: in layers that run, and in the priced program."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from haliax._src import scan as haliax_scan
from haliax.nn.scan import ScanCheckpointPolicy
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.stage import StageName
from shardplan.cost.sparse.stages import CHOICE_PASSES, sparse_stages
from shardplan.cost.sparse.work import work_of
from shardplan.decoder.config import DecoderConfig
from shardplan.errors import ConfigError
from shardplan.model.gradient_checkpointing.kept_selection import groups_keep_selection
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan, SparseKernel
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.plan.workload.workload import Workload
from shardplan.program.operations import all_operations
from shardplan.program.step_trace import plan_kept_activations, plan_step, trace_step
from shardplan.program.variants.checkpointed import is_rewritable, with_policy
from shardplan.program.walk import build_step

KEYS = json.loads((ROOT / "configs" / "nsa-tiny.json").read_text())
LAYERS, BATCH, POSITIONS, GROUPS, SELECTED = 2, 8, 128, 2, 4
BLOCKS = "selected_blocks"
POLICIES = {
    "default": True, "offload": "offload", "recompute": "recompute", "nested": ScanCheckpointPolicy(nested=2),
    "context": ScanCheckpointPolicy(save_block_internals=["context"]),
    "carries on the host": ScanCheckpointPolicy(save_carries="offload"),
    "blocks on the host": ScanCheckpointPolicy(offload_block_internals=[BLOCKS]),
}  # fmt: skip


def loss(module, tokens):
    weight = hax.ones_like(tokens).astype(jnp.float32)
    return module.compute_next_token_loss(LmExample(tokens, weight, AttentionMask.causal())).scalar()


def module_of(policy):
    config = replace(DecoderConfig.from_hf_config(dict(KEYS)), gradient_checkpointing=policy)
    return config.build(hax.Axis("vocab", KEYS["vocab_size"]), key=jax.random.key(0))


def tokens_of():
    axes = (hax.Axis("batch", 2), hax.Axis("position", POSITIONS))
    return hax.random.randint(jax.random.key(1), axes, 0, KEYS["vocab_size"])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_blocks_are_selected_once(policy):
    """The program of the gradients has one choice of blocks, in the loop over layers of the forward pass."""
    made = eqx.filter_eval_shape(lambda: module_of(policy))
    program = str(eqx.filter_make_jaxpr(eqx.filter_grad(loss))(made, tokens_of())[0])
    assert program.count("top_k") == 1


@pytest.mark.parametrize("name", ["default", "nested"])
def test_gradients_are_those_without_checkpointing(name):
    results = []
    for policy in (False, POLICIES[name]):
        gradients = eqx.filter_jit(eqx.filter_grad(loss))(module_of(policy), tokens_of())
        results.append([np.asarray(leaf) for leaf in jax.tree.leaves(gradients)])
    for expected, found in zip(*results, strict=True):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_groups_of_layers_are_equal(raises_message):
    with raises_message(ConfigError):
        eqx.filter_eval_shape(loss, module_of(ScanCheckpointPolicy(nested=3)), tokens_of())


def test_other_threads_scan_as_haliax_does():
    """Of three layers in two groups, Haliax and the decoder say different things."""
    scan = partial(haliax_scan.multilevel_scan, lambda carry, x: (carry, x), 0, jnp.arange(3), 2, 3)
    with groups_keep_selection(), ThreadPoolExecutor() as threads:
        other = threads.submit(scan)
        with pytest.raises(ConfigError, match="nested:2"):
            scan()
    with pytest.raises(ValueError, match="must be divisible"):
        other.result()
    with pytest.raises(ValueError, match="must be divisible"):
        scan()


def training(policy):
    return Workload("train", BATCH, POSITIONS, gradient_checkpointing=policy).resolve()


def facts(step):
    """The tasks and the points of a step, in no order."""
    tasks = []
    for task in step.tasks:
        in_order = task.operands if task.kind != "elementwise" else tuple(sorted(task.operands, key=repr))
        tasks.append(replace(task, operands=in_order, first_used_weights=(), loop=None).cost_key)
    return Counter(tasks), {frozenset(point) for point in step.points}


@pytest.mark.parametrize(
    "text", ["default", "default+context", f"default+{BLOCKS}", f"offload_carries+attn_out+{BLOCKS}@host"]
)
def test_the_priced_program_is_that_of_the_layers(text):
    model, policy = build_model(dict(KEYS), POSITIONS), CheckpointPolicy.parse(text)
    base = trace_step(model, training("default"), selects_again=True)
    assert any(each.activation == BLOCKS for each in all_operations(base.operations))
    assert is_rewritable(base, policy)
    expected = build_step(trace_step(model, training(text)))
    assert facts(build_step(with_policy(base, policy))) == facts(expected)


def stages_of(policy, method):
    """The stages of each call and gradient of a step, in the order of the program, on one device."""
    step = plan_step(build_model(dict(KEYS), POSITIONS), training(policy))
    mesh, attention = {"replica": 1, "data": 1, "model": 1}, AttentionPlan(kernel=method)
    assignment = ShardingAssignment(mesh, {}, {}, step.merged_axes, step.activation_axes, attention=attention)
    return [sparse_stages(task, work_of(task, assignment)) for task in step.sparse_tasks]


COMMON = [StageName.COMPRESSION, StageName.COMPRESSED, StageName.SELECTED, StageName.WINDOW]
CHOICES = {SparseKernel.KERNEL: {StageName.CHOICE, StageName.IMPORTANCE}}


@pytest.mark.parametrize("method", SparseKernel)
@pytest.mark.parametrize(
    ("policy", "choosing"),
    [
        ("default", [True, False, False]),
        ("offload_carries", [True, False, False]),
        ("save_all", [True, False]),
        # Haliax computes a group of layers again, and then each layer of it
        ("nested", [True, False, False, False]),
    ],
)
def test_blocks_are_chosen_where_the_program_chooses_them(method, policy, choosing):
    """In the forward pass; again only under `nested`; and never in a gradient, which is the last."""
    chosen = CHOICES.get(method, {StageName.CHOICE})
    for stages, chooses in zip(stages_of(policy, method), choosing, strict=True):
        names = {stage.name for stage in stages}
        assert names >= {*COMMON}
        assert names & {StageName.CHOICE, StageName.IMPORTANCE} == (chosen if chooses else set())


def test_the_price_of_a_choice():
    """A call that is computed again takes less time than the one of the forward pass, by its one stage."""
    forward, again, gradient = map(Counter, stages_of("default", SparseKernel.DENSE_MASK))
    (choice,) = forward - again
    blocks = POSITIONS // KEYS["native_sparse_attention"]["selection_block"]
    assert (choice.flops, choice.bytes) == (0.0, CHOICE_PASSES * 4 * LAYERS * BATCH * POSITIONS * GROUPS * blocks)
    # two passes of all else, because a device computes 128 positions as one chunk
    assert gradient == Counter(stage.times(2) for stage in again)


def test_the_search_keeps_them_under_every_policy():
    """Nothing is chosen about blocks, nor about the context: without it attention is computed again all the same."""
    model, workload = build_model(dict(KEYS), POSITIONS), training("default")
    kept = plan_kept_activations(model, workload, False)
    assert kept is not None
    options = {option.policy.names: option for of_activation in kept.activations for option in of_activation}
    assert ("query_proj",) in options
    assert not any(name in names for names in options for name in ("context", BLOCKS))


def test_memory_has_the_blocks_of_all_layers():
    """Between the passes there is a stack of int32 numbers of blocks, of all layers."""
    step = plan_step(build_model(dict(KEYS), POSITIONS), training("default"))
    stacks = Counter[int]()
    for point in step.points:
        for array in {buffer.array for buffer, _ in point}:
            if array.logical_axes == ("layers", "batch", "position", "kv_head"):
                stacks[array.elements * array.itemsize] += 1
    assert set(stacks) == {4 * LAYERS * BATCH * POSITIONS * GROUPS * SELECTED}
