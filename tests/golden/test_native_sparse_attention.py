"""Native Sparse Attention against an oracle in NumPy and float64: outputs, blocks, statistics, gradients."""

import itertools
from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import nsa_oracle as oracle
import numpy as np
import pytest
from nsa_oracle import Nsa

from shardplan.decoder import NativeSparseAttention, NativeSparseConfig, SelectedMethod
from shardplan.decoder.parts.attention.sparse import device_branches
from shardplan.decoder.parts.attention.sparse.branches.compressed_branch import importance_of
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import attend_to_selected
from shardplan.decoder.parts.attention.sparse.branches.selection import select
from shardplan.decoder.parts.attention.sparse.statistics import closed_form, figures
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.runtime.private_jax import scan_counts

BASE = Nsa(24, 2, 3, 8, 6, block=8, stride=4, selection_block=16, selected=4, window=10)
DENSE, GATHERED, KERNEL = SelectedMethod
LONG = 1000
"""Queries per chunk of a layer that is computed as one chunk."""
GAP = 1e-6
"""Importances that differ by less may be ranked otherwise in float32."""


def named(x):
    return hax.named(jnp.asarray(x, jnp.float32), ("batch", "position", "embed"))


def make(nsa, positions, batch=2):
    """Parameters, an input, and the layer."""
    parameters = oracle.make_parameters(nsa, 1)
    x = np.random.default_rng(2).normal(size=(batch, positions, nsa.embed))
    return parameters, x, NativeSparseAttention.from_arrays(NativeSparseConfig(**vars(nsa)), parameters)


def value_and_gradients(layer, x, cotangent, method, queries_per_chunk):
    """The output with its details, and name -> gradient of sum(output * cotangent)."""

    def loss(layer, x):
        result = layer(x, method, with_details=True, queries_per_chunk=queries_per_chunk)
        return (result.output.array * cotangent).sum(), result

    (by_layer, by_x), result = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, named(x))
    named_gradients = {**by_layer.parameters, "x": by_x}
    return result, {name: np.asarray(gradient.array) for name, gradient in named_gradients.items()}


def distinct_rows(nsa, importance):
    """bool[b, t, g]: whether the last block that is chosen and the first that is not differ by more than `GAP`."""
    result = np.ones(importance.shape[:3], bool)
    for b, t, g in np.ndindex(result.shape):
        ranked = oracle.ranked_choices(nsa, importance[b, t, g], t)
        free = nsa.selected - len(oracle.forced_blocks(nsa, t))
        if 0 < free < len(ranked):
            scores = importance[b, t, g, ranked[free - 1 : free + 1]]
            result[b, t, g] = scores[0] - scores[1] > GAP
    return result


@pytest.mark.parametrize(
    ("changes", "positions", "method", "queries_per_chunk"),
    [
        ({}, 75, DENSE, LONG),  # not a multiple of a block
        ({}, 75, GATHERED, 32),
        ({"groups": 4, "heads_per_group": 1, "compression": "linear", "selected": 6}, 96, DENSE, 32),  # n blocks
        ({"groups": 1, "heads_per_group": 16, "compression": "mean", "stride": 8}, 75, GATHERED, LONG),
        ({"compression": "mean", "compressed_rope": "none", "window": 200, "value_size": 8}, 50, DENSE, LONG),
        ({"compression": "linear", "theta": None, "initial": 0, "local": 1, "hidden": 5}, 70, GATHERED, LONG),
        ({"hidden": 5, "window": 1}, 5, GATHERED, 2),  # no compressed block
        ({"selected": 9}, 40, GATHERED, LONG),  # more blocks than the sequence has
        ({"selected": 9}, 70, KERNEL, 32),
    ],
)
def test_layer(changes, positions, method, queries_per_chunk):
    nsa = replace(BASE, **changes)
    parameters, x, layer = make(nsa, positions)
    cotangent = np.random.default_rng(3).normal(size=x.shape)
    result, gradients = value_and_gradients(layer, x, cotangent, method, queries_per_chunk)
    blocks = np.asarray(result.blocks.array)
    y = oracle.project(nsa, parameters, x)
    expected = oracle.attend_loops(nsa, y)
    assert blocks.dtype == np.int32
    assert result.blocks.axes[2:] == (layer.config.KVHeads, layer.config.Selected)
    is_distinct = distinct_rows(nsa, expected["importance"])
    assert is_distinct.mean() > 0.9
    assert (blocks == expected["blocks"])[is_distinct].all()
    output = oracle.layer_for_blocks(nsa, parameters, x, blocks)
    same_blocks = (blocks == expected["blocks"]).all(axis=(-2, -1))
    # what the oracle computes for given blocks, and derives its gradients from, is its own definition
    assert np.abs(output - oracle.combine(parameters, y, expected))[same_blocks].max() < 1e-12
    assert np.abs(np.asarray(result.output.array) - output).max() < 1e-4
    for name, gradient in oracle.gradients(nsa, parameters, x, blocks, cotangent).items():
        # that of phi_k_pe is 0 without rotation, because it adds the same to all scores of a query
        assert np.abs(gradients[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 0.01), name
    assert closed_form(layer.config, positions).items() <= figures(layer.config, result.sums).items()


def expected_figures(nsa, parameters, x, tile):
    """The figures of the oracle, by loops."""
    y = oracle.project(nsa, parameters, x)
    results = oracle.attend_loops(nsa, y)
    blocks, importance = results["blocks"], results["importance"]
    k = oracle.keys_per_row(nsa, blocks)
    free_importance, jaccard, unions, free = 0.0, [], [], {}
    for b, t, g in np.ndindex(k.shape):
        forced = oracle.forced_blocks(nsa, t)
        free[b, t, g] = {*blocks[b, t, g].tolist()} - forced - {-1}
        free_importance += importance[b, t, g].sum() - importance[b, t, g, sorted(forced)].sum()
        before = free.get((b, t - 1, g), set())
        if t and before | free[b, t, g]:
            jaccard.append(len(before & free[b, t, g]) / len(before | free[b, t, g]))
        if t % tile == 0:
            unions.append(len({*blocks[b, t : t + tile, g].flatten().tolist()} - {-1}))
    gates = y["gate"].reshape(-1, 3)
    entropy = -(gates * np.log(gates) + (1 - gates) * np.log(1 - gates))
    return {
        "rows": k.size,
        "k_mean": k.mean(),
        "k_max": k.max(),
        "pct_at_max": (k == k.max()).mean(),
        "free_importance": free_importance / importance.sum(),
        "free_attention": results["free_mass"].mean() / nsa.heads_per_group,
        "jaccard_next_query": np.mean(jaccard),
        "tile_union": np.mean(unions),
        "load": [(blocks == j).any(axis=-1).mean() for j in range(nsa.selection_blocks(x.shape[1]))],
        **{f"gate_mean_{name}": gates[:, i].mean() for i, name in enumerate(oracle.BRANCHES)},
        **{f"gate_entropy_{name}": entropy[:, i].mean() for i, name in enumerate(oracle.BRANCHES)},
    }


@pytest.mark.parametrize("method", SelectedMethod)
def test_statistics(method):
    """With several free choices, and a last tile that is shorter."""
    nsa = replace(BASE, selection_block=8, selected=5)
    parameters, x, layer = make(nsa, 75)
    compute = jax.jit(lambda x: layer(x, method, with_details=True, query_tile=4).sums)
    sums = compute(named(x))
    expected = expected_figures(nsa, parameters, x, 4)
    found = figures(layer.config, sums)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_importance_is_equation_9():
    for block, stride, selection_block in ((8, 4, 16), (32, 16, 64), (4, 4, 4), (12, 4, 12)):
        nsa = replace(BASE, block=block, stride=stride, selection_block=selection_block)
        positions = 3 * selection_block + 5
        weights = np.random.default_rng(0).random(nsa.compressed_blocks(positions))
        blocks = nsa.selection_blocks(positions)
        found = importance_of(NativeSparseConfig(**vars(nsa)), jnp.asarray(weights, jnp.float32), blocks)
        expected = [oracle.equation_9(nsa, weights, j + 1) for j in range(blocks)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(weights @ oracle.shared_tokens(nsa, positions), expected)


@pytest.mark.parametrize("method", [DENSE, GATHERED, pytest.param(KERNEL, marks=pytest.mark.whole)])
def test_outputs_depend_on_no_later_token(method):
    _, x, layer = make(BASE, 75)
    border = 50
    compute = jax.jit(lambda x: layer(x, method, queries_per_chunk=32).array)
    output = np.asarray(compute(named(x)))
    changed = x.copy()
    changed[:, border:] += 1
    later = np.asarray(compute(named(changed)))
    assert (later[:, :border] == output[:, :border]).all()
    assert (later[:, border:] != output[:, border:]).any(axis=-1).all()
    prefix = jax.jit(lambda x: layer(x, method).array)(named(x[:, :border]))
    assert np.abs(np.asarray(prefix) - output[:, :border]).max() < 1e-5


@pytest.mark.parametrize("method", [DENSE, GATHERED, pytest.param(KERNEL, marks=pytest.mark.whole)])
def test_queries_before_the_first_compressed_block(method):
    """Outputs and gradients are finite, also within the computation, and the compressed branch gets no gradient."""
    _, x, layer = make(BASE, 20)
    cotangent = np.zeros(x.shape)
    cotangent[:, : BASE.block - 1] = 1
    with jax.debug_nans(True):
        result, gradients = value_and_gradients(layer, x, cotangent, method, LONG)
    assert np.isfinite(np.asarray(result.output.array)).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    of_compressed = [name for name in gradients if name.startswith("phi") or name.endswith("cmp")]
    assert len(of_compressed) == 12 and not any(gradients[name].any() for name in of_compressed)
    assert gradients["k_slc"].any() and not gradients["x"][:, BASE.block - 1 :].any()


def test_equal_scores_select_the_first_blocks():
    """All compressed keys are 0."""
    nsa = replace(BASE, selection_block=8, selected=5)
    parameters, x, _ = make(nsa, 100)
    for name in ("phi_k_w2", "phi_k_b2"):
        parameters[name] *= 0
    layer = NativeSparseAttention.from_arrays(NativeSparseConfig(**vars(nsa)), parameters)
    blocks = np.asarray(jax.jit(lambda x: layer(x, with_details=True).blocks.array)(named(x)))
    expected = np.full((100, nsa.selected), -1)
    for t in range(100):
        chosen = oracle.select(nsa, np.zeros(nsa.selection_blocks(100)), t)
        expected[t, : len(chosen)] = chosen
    assert (blocks == expected[None, :, None]).all()


@pytest.mark.parametrize("method", [DENSE, GATHERED])
def test_unused_entries_are_no_block(method):
    """A query in block 1 that selects that block alone: block 0, which stands in for unused ones, gets no gradient."""
    config = NativeSparseConfig(**vars(BASE))
    rng = np.random.default_rng(0)
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(1, *shape)), jnp.float32) for shape in ((1, 2, 3, 8), (40, 2, 8), (40, 2, 6))
    )
    blocks = jnp.broadcast_to(jnp.array([1, -1, -1, -1]), (1, 1, 2, 4))

    def attend(keys, values):
        return attend_to_selected(config.selection, method, 1, jnp.array([25]), queries, blocks, keys, values).output

    output, backward = jax.vjp(attend, keys, values)
    for gradient in backward(jnp.ones_like(output)):
        is_reached = np.asarray(gradient != 0).any(axis=(0, 2, 3))
        assert is_reached.tolist() == [16 <= token <= 25 for token in range(40)]


def gradient_program(layer, x, policy):
    """A function of the input that returns gradients, blocks and sums, with rematerialisation by a policy."""

    def loss(x):
        result = layer(x, GATHERED, with_details=True, queries_per_chunk=32)
        return (result.output.array**2).sum(), result

    compute = loss if policy is None else jax.checkpoint(loss, policy=policy)
    return jax.grad(compute, has_aux=True)


def test_rematerialisation():
    """Saved blocks are not selected again; blocks, statistics and gradients are those without rematerialisation."""
    _, x, layer = make(BASE, 75)
    keep_nothing = jax.checkpoint_policies.nothing_saveable
    keep_blocks = jax.checkpoint_policies.save_only_these_names(ActivationName.SELECTED_BLOCKS.value)
    results = {}
    for name, policy, selections in (("none", None, 1), ("nothing", keep_nothing, 2), ("blocks", keep_blocks, 1)):
        compute = gradient_program(layer, named(x), policy)
        assert str(jax.make_jaxpr(compute)(named(x))).count("top_k") == selections, name
        results[name] = jax.jit(compute)(named(x))
    gradient, result = results["none"]
    for other_gradient, other in (results["nothing"], results["blocks"]):
        assert (other.blocks.array == result.blocks.array).all()
        assert figures(layer.config, other.sums)["rows"] == figures(layer.config, result.sums)["rows"] == 2 * 75 * 2
        assert closed_form(layer.config, 75).items() <= figures(layer.config, other.sums).items()
        np.testing.assert_allclose(other_gradient.array, gradient.array, atol=1e-5)


@pytest.mark.parametrize("method", SelectedMethod)
def test_nothing_is_computed_on_the_host(method):
    _, x, layer = make(BASE, 75)

    def loss(layer, x):
        result = layer(x, method, with_details=True, queries_per_chunk=32)
        return (result.output.array**2).sum(), result

    program = jax.jit(jax.grad(loss, has_aux=True)).lower(layer, named(x)).as_text()
    assert "top_k" in program
    for operation in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv", "tensor<?"):
        assert operation not in program


def test_statistics_are_traced_on_request_only(monkeypatch):
    _, x, layer = make(BASE, 75)
    monkeypatch.setattr(device_branches, "selection_sums", None)
    assert jax.eval_shape(layer, named(x)).array.shape == x.shape
    with pytest.raises(TypeError, match="not callable"):
        jax.eval_shape(lambda x: layer(x, with_details=True), named(x))


def test_bfloat16():
    """Outputs have the dtype of inputs and parameters; what is selected by has float32."""
    _, x, layer = make(BASE, 75)
    narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), layer)
    result = jax.eval_shape(lambda x: narrow(x, with_details=True), named(x).astype(jnp.bfloat16))
    assert result.output.array.dtype == jnp.bfloat16
    assert result.sums.importance.dtype == jnp.float32
    assert result.sums.k_max.dtype == result.blocks.array.dtype == jnp.int32


def loops(jaxpr):
    """The loops of a program, also within its functions."""
    for operation in jaxpr.eqns:
        if operation.primitive.name == "scan":
            yield operation
        for value in operation.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from loops(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("method", [DENSE, GATHERED])
def test_gradients_of_chunks_are_added_in_float32(method):
    """In bfloat16, a sum stops growing at 256 times what is added."""
    _, x, layer = make(BASE, 75)
    narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), layer)
    compute = jax.grad(lambda x: narrow(x, method, queries_per_chunk=32).array.astype(jnp.float32).sum())
    program = jax.make_jaxpr(compute)(named(x).astype(jnp.bfloat16))
    carries = [operation.outvars[: scan_counts(operation.params)[1]] for operation in loops(program.jaxpr)]
    assert sorted(map(len, carries)) == [0, 0, 0, 2, 2, 2]  # forward and backward loops of three branches
    assert {carry.aval.dtype for carry in itertools.chain(*carries)} == {jnp.dtype("float32")}


def test_selection_of_few_blocks():
    """Sequences with fewer blocks than a query may select; and forced blocks win over any importance."""
    config = NativeSparseConfig(**vars(replace(BASE, selected=3)))
    positions = jnp.array([15, 16, 47, 79])
    importance = jnp.array([1.0, 8.0, 9.0, 2.0, 1.0])
    blocks = select(config, jnp.broadcast_to(importance, (1, 4, 1, 5)), positions)
    assert blocks[0, :, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 3, 4]]
    alone = select(config, jnp.zeros((1, 1, 1, 1)), jnp.array([3]))
    assert alone.tolist() == [[[[0, -1, -1]]]]
