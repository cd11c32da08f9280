"""The block of routed experts on several devices, against a dense sum over all experts in float64."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from jax.sharding import Mesh

from shardplan.errors import ConfigError
from shardplan.experts import block, expert_weights, local_rounds, tiles
from shardplan.experts.block import compute_routed_mlp, replace_routed_mlp, routed_mlp
from shardplan.experts.expert_weights import ExpertFunction, ExpertWeights
from shardplan.experts.grouped_matmul import grouped_matmul
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.experts.strategies.exchange_tokens import Slices, ragged_all_to_all
from shardplan.hardware import GENERATIONS

GATHER, EXCHANGE, WEIGHTS = ExpertStrategy
BOTH = ("data", "model")
FEW, ENOUGH = 0.25, 1.25
"""Factors of buffers: rows overflow, or they do not where experts get about equally many."""
CASES = {
    "experts over 2": ((4, 2), {"batch": BOTH, "experts": "model"}),
    "experts over 8": ((2, 4), {"batch": BOTH, "experts": BOTH}),
    "experts over 4, of sharded positions": ((2, 4), {"batch": "data", "position": "model", "experts": "model"}),
    "experts over 2, hidden over 4": ((2, 4), {"batch": BOTH, "experts": "data", "mlp": "model"}),
    "hidden over 3": ((2, 3), {"batch": "data", "position": "model", "mlp": "model"}),
    "experts over 5": ((1, 5), {"position": "model", "experts": "model"}),
    "one device": ((1, 1), {}),
}
SAME_TOKENS = ((2, 4), {"batch": "data", "experts": "model"})
SIZES = {"experts": 40, "embed": 12, "mlp": 24, "batch": 8, "position": 60, "choice": 2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "BUFFER_MULTIPLE", 8)
    monkeypatch.setattr(local_rounds, "OVERFLOW_ROWS", 64)


def named(values, *names):
    return hax.named(jnp.asarray(values), tuple(hax.Axis(name, SIZES[name]) for name in names))


def make_inputs(chosen="random", has_gate=True, has_biases=False):
    rng = np.random.default_rng(0)

    def normal(*names):
        return named(0.3 * rng.normal(size=[SIZES[name] for name in names]).astype(np.float32), *names)

    up, down = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    biases = [("experts", "mlp"), ("experts", "mlp"), ("experts", "embed")] if has_biases else []
    weights = ExpertWeights(
        normal(*up) if has_gate else None, normal(*up), normal(*down), *(normal(*b) for b in biases)
    )
    x, cotangent = (normal("batch", "position", "embed") for _ in range(2))
    shape = SIZES["batch"], SIZES["position"]
    if chosen == "random":
        experts = rng.random((*shape, SIZES["experts"])).argsort()[..., :2]
    else:  # all tokens have the same experts, and 38 experts have none
        experts = np.broadcast_to([3, 39], (*shape, 2))
    factors = named(rng.random((*shape, 2)).astype(np.float32), "batch", "position", "choice")
    return x, named(experts.astype(np.int32), "batch", "position", "choice"), factors, weights, cotangent


def activate(gate, up):
    return jnp.tanh(up) if gate is None else jax.nn.silu(gate) * up


def dense_sum(x, chosen, factors, weights, cotangent, weighs_inputs=False):
    """The sum of `cotangent` times the outputs, with every expert applied to every token."""
    is_chosen = jax.nn.one_hot(chosen, SIZES["experts"])
    shares = (is_chosen * factors[..., None]).sum(-2)
    x = x[:, :, None]
    if weighs_inputs:
        x, shares = x * shares[..., None], is_chosen.sum(-2)

    def project(array, matrices, bias):
        products = jnp.einsum("bpei,eio->bpeo", jnp.broadcast_to(array, (*shares.shape, array.shape[-1])), matrices)
        return products if bias is None else products + bias

    gate = None if weights.gate is None else project(x, weights.gate, weights.gate_bias)
    outputs = project(activate(gate, project(x, weights.up, weights.up_bias)), weights.down, weights.down_bias)
    return (jnp.einsum("bpeo,bpe->bpo", outputs, shares) * cotangent).sum()


def arrays_of(tree):
    return jax.tree.map(
        lambda leaf: getattr(leaf, "array", leaf), tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray)
    )


def wide(tree):
    with jax.enable_x64(True):
        return jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64 if a.dtype == np.float32 else a.dtype)), tree
        )


def check(case, method, inputs, weighs_inputs=False):
    """Value and gradients of tokens, routing weights and weights of experts."""
    shape, mapping = case
    x, chosen, factors, weights, cotangent = inputs

    def block_sum(x, factors, weights):
        function = ExpertFunction(activate, weighs_inputs)
        with replace_routed_mlp(lambda call: compute_routed_mlp(call, method)):
            y = routed_mlp("experts", "mlp", "embed", x, chosen, factors, weights, function)
        assert y.axes == x.axes
        return hax.sum(y * cotangent).scalar()

    with jax.enable_x64(True):
        plain = wide(arrays_of((x, factors, weights, chosen, cotangent)))
        expected = jax.value_and_grad(lambda x, f, w: dense_sum(x, plain[3], f, w, plain[4], weighs_inputs), (0, 1, 2))(
            *plain[:3]
        )
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    with jax.set_mesh(Mesh(devices, BOTH)):
        run = hax.named_jit(jax.value_and_grad(block_sum, (0, 1, 2)), axis_resources=mapping)
        actual = run(x, factors, weights)
    for value, reference in zip(jax.tree.leaves(arrays_of(actual)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=2e-6 * np.abs(reference).max())


@pytest.mark.parametrize("strategy", ExpertStrategy)
@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_dense_sum(case, strategy):
    check(CASES[case], ExpertMethod(strategy, ENOUGH), make_inputs())


@pytest.mark.parametrize("chosen", ["random", "same"])
@pytest.mark.parametrize("strategy", [GATHER, EXCHANGE])
@pytest.mark.parametrize(
    "case", ["experts over 2, hidden over 4", "experts over 5", pytest.param("experts over 8", marks=pytest.mark.whole)]
)
def test_what_overflows_is_computed(case, strategy, chosen):
    """In further rounds: also where all tokens have the same two experts, and all others have none."""
    check(CASES[case], ExpertMethod(strategy, FEW), make_inputs(chosen))


@pytest.mark.parametrize("strategy", ExpertStrategy)
def test_biases_and_experts_without_gates(strategy):
    inputs = make_inputs(has_gate=False, has_biases=True)
    check(CASES["experts over 2, hidden over 4"], ExpertMethod(strategy, FEW), inputs)


@pytest.mark.parametrize("strategy", ExpertStrategy)
def test_tokens_that_are_weighed_before_their_experts(strategy):
    check(CASES["experts over 2, hidden over 4"], ExpertMethod(strategy, FEW), make_inputs(), weighs_inputs=True)


@pytest.mark.quick
@pytest.mark.parametrize("strategy", [GATHER, WEIGHTS])
def test_tokens_that_all_devices_of_the_experts_have(strategy):
    check(SAME_TOKENS, ExpertMethod(strategy, FEW), make_inputs())


def test_tokens_that_all_devices_have_are_not_exchanged(raises_message):
    with raises_message(ConfigError):
        check(SAME_TOKENS, ExpertMethod(EXCHANGE), make_inputs())


@pytest.mark.parametrize("strategy", ExpertStrategy)
def test_rows_that_hold_nothing_never_reach_a_result(monkeypatch, strategy):
    """Kernels leave any values in them, in results and in gradients: here NaN."""

    def spoil(rows, sizes):
        return jnp.where(jnp.arange(len(rows))[:, None] < sizes.sum(), rows, jnp.nan)

    @partial(jax.custom_vjp, nondiff_argnums=(3,))
    def spoiled_matmul(rows, matrices, sizes, generation):
        return spoil(grouped_matmul(rows, matrices, sizes), sizes)

    def forward(rows, matrices, sizes, generation):
        return spoiled_matmul(rows, matrices, sizes, generation), (rows, matrices, sizes)

    def backward(generation, residuals, gradient):
        rows, matrices, sizes = residuals
        pull_back = jax.vjp(lambda rows, matrices: grouped_matmul(rows, matrices, sizes), rows, matrices)[1]
        to_rows, to_matrices = pull_back(gradient)
        return spoil(to_rows, sizes), to_matrices, None

    spoiled_matmul.defvjp(forward, backward)
    monkeypatch.setattr(expert_weights, "grouped_matmul", spoiled_matmul)
    check(CASES["experts over 2, hidden over 4"], ExpertMethod(strategy, FEW), make_inputs())


def test_without_a_plan_kernels_have_tiles_for_the_devices(monkeypatch):
    """A program for TPUs says its tiles, and one for CPUs, which have no such kernel, says none."""
    x, chosen, factors, weights, _ = make_inputs()

    def lower():
        def run(x):
            return routed_mlp("experts", "mlp", "embed", x, chosen, factors, weights, ExpertFunction(activate)).array

        return jax.jit(run).lower(x).as_text()

    assert "ragged_dot_tiling" not in lower()
    monkeypatch.setattr(block, "generation_of_device", lambda kind: GENERATIONS["v5p"])
    assert "ragged_dot_tiling" in lower()


@pytest.mark.quick
def test_tokens_must_be_whole(raises_message):
    with raises_message(ConfigError):
        check(((2, 4), {"batch": "data", "embed": "model"}), ExpertMethod(), make_inputs())


@pytest.mark.quick
def test_segments_that_are_sent_on_cpus():
    """The example in the documentation of `jax.lax.ragged_all_to_all`, on two devices."""
    arguments = [
        [[1, 2, 2], [3, 4, 0]], [[0, 0, 0, 0]] * 2, [[0, 1]] * 2, [[1, 2], [1, 1]], [[0, 0], [1, 2]],
        [[1, 1], [2, 1]],
    ]  # fmt: skip

    def send(operand, output, *numbers):
        slices = Slices(*(n[0] for n in numbers))
        rows = ragged_all_to_all(operand[0][:, None], output[0][:, None], slices, ("data",))
        return rows[None, :, 0]

    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        spec = jax.sharding.PartitionSpec("data")
        sharded = jax.jit(jax.shard_map(send, in_specs=spec, out_specs=spec, check_vma=False))
        np.testing.assert_array_equal(sharded(*map(jnp.asarray, arguments)), [[1, 3, 0, 0], [2, 2, 4, 0]])
