"""Experts of Levanter's models by shardplan's block, against Levanter's own blocks on one device."""

import dataclasses
import re
from functools import cache

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from jax.sharding import Mesh
from levanter.models.mixtral import MixtralConfig, MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from shardplan.checkpoint.mapping.state_dict_program import trace_program
from shardplan.errors import ConfigError
from shardplan.experts import local_rounds, tiles
from shardplan.experts.block import replace_routed_mlp
from shardplan.experts.levanter import has_parallel_experts, restore_blocks, with_expert_parallel
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import abstract_module

GATHER, EXCHANGE, WEIGHTS = ExpertStrategy
BOTH = ("data", "model")
MAPPING = {"batch": BOTH, "experts": "data", "mlp": "model"}
SIZES = {
    "max_seq_len": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL = MixtralConfig(intermediate_dim=24, n_routed_experts=8, **SIZES)
QWEN3 = Qwen3MoeConfig(moe_intermediate_dim=24, num_experts=8, head_dim=8, **SIZES)
UNNORMALISED = dataclasses.replace(QWEN3, norm_topk_prob=False)
BLOCKS = {MixtralConfig: MixtralSparseMoeBlock, Qwen3MoeConfig: Qwen3MoeSparseMoeBlock}
VOCAB, BATCH = hax.Axis("vocab", 32), hax.Axis("batch", 8)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "BUFFER_MULTIPLE", 8)
    monkeypatch.setattr(local_rounds, "OVERFLOW_ROWS", 16)


def mesh_of(*shape):
    return jax.set_mesh(Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), BOTH))


def make_block(config, is_skewed=False, dtype=jnp.float32):
    """Make a block of Levanter; a skewed router gives all tokens the experts 3 and 5, whatever else they are."""
    block = BLOCKS[type(config)].init(config, key=jax.random.PRNGKey(0))
    if is_skewed:
        gate = block.gate.weight.rearrange((config.Experts, config.Embed))
        weight = hax.named(gate.array.at[jnp.array([3, 5]), 0].set(jnp.array([9.0, 8.0])), gate.axes)
        block = eqx.tree_at(lambda b: b.gate.weight, block, weight.rearrange(block.gate.weight.axes))
    return jax.tree.map(lambda a: a.astype(dtype) if eqx.is_array(a) else a, block)


def make_tokens(config, dtype=jnp.float32):
    """Tokens with a 1 as their first element, and a cotangent."""
    rng = np.random.default_rng(0)
    axes = (BATCH, config.max_Pos, config.Embed)
    x, cotangent = (rng.normal(size=[axis.size for axis in axes]) for _ in range(2))
    x[..., 0] = 1
    return hax.named(jnp.asarray(x, dtype), axes), hax.named(jnp.asarray(cotangent, dtype), axes)


def compute(block, x, cotangent, mapping):
    """The block's outputs and extras, and the gradients of the sum of both losses and of weighted outputs."""

    def total(block, x):
        outputs, extras = block(x)
        assert outputs.axes == x.axes
        losses = [value.scalar() for name, value in extras.items() if name.endswith("loss")]
        return hax.sum(outputs * cotangent).scalar() + 100 * sum(losses), (outputs, extras)

    arrays, static = eqx.partition(block, eqx.is_array)
    differentiate = jax.value_and_grad(lambda arrays, x: total(eqx.combine(arrays, static), x), (0, 1), has_aux=True)
    (_, results), gradients = hax.named_jit(differentiate, axis_resources=mapping)(arrays, x)
    return results, gradients


@cache
def levanters(config, is_skewed):
    """What Levanter's own block computes on one device."""
    block, (x, cotangent) = make_block(config, is_skewed), make_tokens(config)
    with mesh_of(1, 1):
        return compute(block, x, cotangent, {})


def check(config, method, is_skewed=False):
    block, (x, cotangent) = make_block(config, is_skewed), make_tokens(config)
    expected = levanters(config, is_skewed)
    if is_skewed and isinstance(config, MixtralConfig):  # all rows are those of two experts
        np.testing.assert_array_equal(np.flatnonzero(expected[0][1]["expert_loads"].array), [3, 5])
    with mesh_of(2, 4):
        actual = compute(with_expert_parallel(block, method), x, cotangent, MAPPING)
    assert [*actual[0][1]] == [*expected[0][1]]
    compare(actual, expected)


def compare(actual, expected, tolerance=3e-6):
    """Compare trees of named arrays, to a part of the largest element of each."""

    def leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))

    for value, reference in zip(leaves(actual), leaves(expected), strict=True):
        value = value.rearrange(reference.axes)
        assert value.dtype == reference.dtype
        wanted = np.asarray(reference.array, np.float64)
        np.testing.assert_allclose(np.asarray(value.array, np.float64), wanted, 0, tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("strategy", ExpertStrategy)
@pytest.mark.parametrize(
    "config", [MIXTRAL, pytest.param(QWEN3, marks=pytest.mark.whole)], ids=["mixtral", "qwen3_moe"]
)
def test_equal_to_levanters_block(config, strategy):
    """Outputs, statistics, auxiliary losses, and the gradients of all of them."""
    check(config, ExpertMethod(strategy))


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (MIXTRAL, GATHER), (QWEN3, EXCHANGE), pytest.param(MIXTRAL, EXCHANGE, marks=pytest.mark.whole),
        pytest.param(QWEN3, GATHER, marks=pytest.mark.whole),
    ],
    ids=["mixtral gathers", "qwen3_moe exchanges", "mixtral exchanges", "qwen3_moe gathers"],
)  # fmt: skip
def test_all_tokens_have_the_same_experts(config, strategy):
    """They overflow the buffers of the devices of these experts, and none is dropped."""
    check(config, ExpertMethod(strategy, 0.25), is_skewed=True)


def test_weights_that_are_not_normalised():
    check(UNNORMALISED, ExpertMethod(GATHER))


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3_moe"])
def test_routers_have_the_dtype_of_levanters(config):
    """In bfloat16, Mixtral's router rounds its scores and that of Qwen3-MoE does not: tokens have the same experts."""
    block, (x, _) = make_block(config, dtype=jnp.bfloat16), make_tokens(config, jnp.bfloat16)
    with mesh_of(1, 1):
        expected = hax.named_jit(lambda block, x: block(x), axis_resources={})(block, x)
    with mesh_of(2, 4):
        parallel = with_expert_parallel(block, ExpertMethod(GATHER))
        actual = hax.named_jit(lambda block, x: block(x), axis_resources=MAPPING)(parallel, x)
    compare(actual, expected, tolerance=0.01)
    if isinstance(config, MixtralConfig):
        np.testing.assert_array_equal(actual[1]["expert_loads"].array, expected[1]["expert_loads"].array)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN3], ids=["mixtral", "qwen3_moe"])
def test_parameters_and_what_is_saved_stay(config):
    """Paths, axes, stored tensors, and which of their bytes make which parameter."""
    model = abstract_module(config, VOCAB)
    parallel = with_expert_parallel(model, ExpertMethod(EXCHANGE))
    assert type(parallel) is type(model) and has_parallel_experts(parallel)
    for (path, own), (name, leaf) in zip(named_leaves(model), named_leaves(parallel), strict=True):
        assert (path, own.axes) == (name, leaf.axes) and own.array is leaf.array
    program, expected = trace_program(parallel), trace_program(model)
    assert (program.tensors, program.constants) == (expected.tensors, expected.constants)
    assert pieces_by_path(program) == pieces_by_path(expected)
    restored = restore_blocks(with_expert_parallel(parallel, ExpertMethod(GATHER)))
    assert jax.tree.structure(restored) == jax.tree.structure(model)


def pieces_by_path(program):
    return {path: [*view.pieces] for path, view in program.views.items()}


def test_a_method_is_used_without_a_plan(monkeypatch):
    """And what computes blocks in a plan receives the call with it."""
    block, (x, _) = make_block(MIXTRAL), make_tokens(MIXTRAL)
    received = []

    def record(call):
        received.append(call.method)
        return call.x

    with replace_routed_mlp(record):
        with_expert_parallel(block, ExpertMethod(WEIGHTS))(x)
    assert received == [ExpertMethod(WEIGHTS)]


class BlockWithMore(MixtralSparseMoeBlock):
    """A subclass that could compute anything."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: make_block(dataclasses.replace(QWEN3, dense_router_gradient=True)),
            "with_expert_parallel: dense_router_gradient is True: every device would compute all experts for all its "
            "tokens; set it to False, or leave the model as it is",
        ),
        (
            lambda: make_block(dataclasses.replace(MIXTRAL, use_bias=True)),
            "with_expert_parallel: experts have biases (use_bias is True), which Levanter shares among all experts; "
            "set use_bias to False",
        ),
        (
            lambda: BlockWithMore(MIXTRAL, *(getattr(make_block(MIXTRAL), name) for name in ("gate", "experts"))),
            "with_expert_parallel: BlockWithMore is a subclass of Levanter's block of experts and may do more; use "
            "Levanter's class, or leave the model as it is",
        ),
        (
            lambda: hax.nn.Linear.init(VOCAB, BATCH, key=jax.random.PRNGKey(0)),
            "Linear has no experts of Levanter's Mixtral or Qwen3-MoE; call with_expert_parallel for a model that has",
        ),
    ],
)
def test_what_is_not_supported_is_refused(model, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        with_expert_parallel(model(), ExpertMethod(GATHER))


@pytest.mark.usefixtures("patched_levanter")
@pytest.mark.parametrize(
    ("config", "mapping", "is_shardplans"),
    [
        (MIXTRAL, MAPPING, True),
        (QWEN3, MAPPING, True),
        (dataclasses.replace(MIXTRAL, dense_router_gradient=True), {"batch": BOTH}, False),
    ],
    ids=["mixtral", "qwen3_moe", "dense gradient"],
)
def test_blocks_of_a_patched_levanter(config, mapping, is_shardplans):
    """Those that shardplan's block does not support stay Levanter's own."""
    block, (x, _) = make_block(config), make_tokens(config)
    calls = []

    def record(call):
        calls.append(call)
        return call.x

    with mesh_of(2, 4), hax.axis_mapping(mapping), replace_routed_mlp(record):
        outputs, _ = eqx.filter_eval_shape(block, x)
    assert outputs.axes == x.axes and bool(calls) == is_shardplans
