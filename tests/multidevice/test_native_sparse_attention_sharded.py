"""Native Sparse Attention on several devices against one: blocks, outputs, gradients, statistics, refusals."""

from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import nsa_oracle as oracle
import numpy as np
import pytest
from sparse_attention_cases import CASES, MIXED, Case, call, make, positions

from shardplan.decoder import NativeSparseAttention
from shardplan.decoder.parts.attention.sparse.statistics import closed_form, figures
from shardplan.errors import ConfigError
from shardplan.model.gradient_checkpointing.activation_names import ActivationName

WHOLE = ("positions 3", "positions 5", "zigzag 2", "mixed 6", "kernel, zigzag 2", "kernel, replicated")
ALL_CASES = [pytest.param(CASES[name], id=name, marks=[pytest.mark.whole] * (name in WHOLE)) for name in CASES]


def value_and_gradients(case):
    """The output with its details, in the order of the sequence, and name -> gradient of sum(output * cotangent)."""

    def compute():
        layer, x, cotangent = make(case)

        def loss(layer, x):
            result = call(case, layer, x, with_details=True)
            return hax.sum(result.output * cotangent).scalar(), result

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(layer, x)

    (by_layer, by_x), result = case.run(compute)
    gradients = {name: np.asarray(gradient.array) for name, gradient in by_layer.parameters.items()}
    gradients["x"] = np.asarray(by_x.array)[:, np.argsort(case.order)]
    blocks, output = (np.asarray(each.array)[:, np.argsort(case.order)] for each in (result.blocks, result.output))
    return blocks, output, result.sums, gradients


@pytest.mark.parametrize("case", ALL_CASES)
def test_equals_one_device(case):
    blocks, output, sums, gradients = value_and_gradients(case)
    expected_blocks, expected_output, expected_sums, expected_gradients = value_and_gradients(case.alone())
    assert (blocks == expected_blocks).all()
    assert np.abs(output - expected_output).max() < 1e-5
    for name, gradient in expected_gradients.items():
        # that of phi_k_pe is 0 without rotation
        assert np.abs(gradients[name] - gradient).max() <= 1e-4 * max(np.abs(gradient).max(), 0.01), name
    for name, value in expected_sums._asdict().items():
        found = np.asarray(getattr(sums, name))
        if value.dtype == jnp.int32:
            assert (found == np.asarray(value)).all(), name
        else:
            np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=name)
    found = figures(case.config, sums)
    assert found["rows"] == case.batch * case.positions * case.nsa.groups
    assert closed_form(case.config, case.positions).items() <= found.items()


@pytest.mark.parametrize("case", [CASES["positions 4"], MIXED], ids=["positions 4", "mixed"])
def test_equal_scores_select_the_first_blocks(case):
    """All compressed keys are 0."""
    case = replace(case, changes={"compression": "mlp"}, params={})

    def compute():
        layer, x, _ = make(case)
        names = [name for name in layer.parameters if name in ("phi_k_w2", "phi_k_b2")]
        layer = NativeSparseAttention(
            layer.parameters | {name: layer.parameters[name] * 0 for name in names}, layer.config
        )
        return jax.jit(lambda x: call(case, layer, x, with_details=True).blocks.array)(x)

    blocks = np.asarray(case.run(compute))[:, np.argsort(case.order)]
    for t in range(case.positions):
        chosen = oracle.select(case.nsa, np.zeros(case.nsa.selection_blocks(case.positions)), t)
        assert (blocks[:, t] == [*chosen, *[-1] * (case.nsa.selected - len(chosen))]).all()


@pytest.mark.parametrize(
    "case", [replace(CASES["positions 4"], changes={}), CASES["mixed"]], ids=["positions 4", "mixed"]
)
def test_outputs_depend_on_no_later_token(case):
    """Tokens from the middle of a shard on are changed, and outputs before are the same bit for bit."""

    def compute():
        layer, x, _ = make(case)
        is_later = hax.named(jnp.asarray(case.order >= border, jnp.float32), "position")
        attend = jax.jit(lambda x: call(case, layer, x).array)
        return attend(x), attend(x + is_later)

    border = case.positions // 2 - 5
    output, changed = (np.asarray(each)[:, np.argsort(case.order)] for each in case.run(compute))
    assert (changed[:, :border] == output[:, :border]).all()
    assert (changed[:, border:] != output[:, border:]).any(axis=-1).all()


def test_gathers_are_narrow_and_their_gradients_wide():
    """In bfloat16, keys and values travel in bfloat16, and sums over devices are in float32."""
    case = replace(MIXED, params={})

    def trace():
        layer, x, _ = make(case)
        narrow, x = (jax.tree.map(lambda array: array.astype(jnp.bfloat16), each) for each in (layer, x))
        loss = jax.grad(lambda x: call(case, narrow, x).array.astype(jnp.float32).sum())
        return jax.make_jaxpr(loss)(x)

    operands = {}
    for operation in operations(case.run(trace).jaxpr):
        operands.setdefault(operation.primitive.name, []).extend(each.aval.dtype for each in operation.invars)
    assert set(operands["all_gather"]) == set(operands["ppermute"]) == {jnp.dtype("bfloat16")}
    assert set(operands["reduce_scatter"]) == {jnp.dtype("float32")}


def operations(jaxpr):
    """The operations of a program, also within its functions and loops."""
    for operation in jaxpr.eqns:
        yield operation
        for value in operation.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from operations(getattr(value, "jaxpr", value))


def test_saved_blocks_are_not_selected_again():
    """A policy of gradient checkpointing keeps the blocks of every device; nothing is computed on the host."""
    case = replace(MIXED, params={})
    keep_blocks = jax.checkpoint_policies.save_only_these_names(ActivationName.SELECTED_BLOCKS.value)

    def differentiate(policy):
        layer, x, cotangent = make(case)

        def loss(x):
            return hax.sum(call(case, layer, x, with_details=True).output * cotangent).scalar()

        gradient = jax.grad(jax.checkpoint(loss, policy=policy) if policy else loss)
        return str(jax.make_jaxpr(gradient)(x)), jax.jit(gradient)(x).array

    (plain, expected), (text, found) = (case.run(differentiate, policy) for policy in (None, keep_blocks))
    assert plain.count("top_k") == text.count("top_k") == 1
    assert "callback" not in text
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_named_jit():
    """The same call of the layer is sharded by Haliax's `named_jit`, with the mapping that it is given."""
    case = CASES["positions 4"]

    def compute():
        layer, x, _ = make(case)
        return hax.named_jit(lambda layer, x: layer(x), axis_resources=case.mapping)(layer, x)

    output = replace(case, mapping={}).run(compute)
    assert output.array.sharding.spec[1] == "sequence"
    layer, x, _ = make(case.alone())
    assert np.abs(np.asarray(output.array) - np.asarray(layer(x).array)).max() < 1e-5


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            Case({"model": 3}, {"q_heads_per_group": "model"}),
            "q_heads_per_group is sharded over 3 devices; shard kv_head instead, because heads of a group select "
            "blocks by one sum, whose all-reduce would be 0.0 MB for each sequence and layer",
        ),
        (positions(4, 104), "104 positions over 4 devices, contiguous; they must be a multiple of 32, so that no block "
         "of 8 is divided: use 96 or 128"),
        (positions(4, 96, layout="zigzag"), "96 positions over 4 devices, zigzag; they must be a multiple of 64, so "
         "that no block of 8 is divided: use 64 or 128"),
        (positions(8, 40), "40 positions over 8 devices, contiguous; they must be a multiple of 64, so that no block "
         "of 8 is divided: use 64"),
        (positions(2, layout="striped"), "layout is striped; blocks and windows need neighbouring tokens: use "
         "contiguous or zigzag"),
        (Case({"data": 2}, {"batch": "data", "position": "data"}, batch=2), "batch and position are both mapped to "
         "data; map each of them to mesh axes of its own"),
        (Case({"model": 4}, {"kv_head": "model"}), "kv_head (2) is not divisible by the 4 devices that shard it"),
        (Case({"data": 2}, {"batch": "data"}), "batch (1) is not divisible by the 2 devices that shard it"),
    ],
)  # fmt: skip
def test_refused(case, message):
    # the input is in the order of positions, because it is refused before it is read
    layer, x, _ = make(replace(case, layout="contiguous"))
    with pytest.raises(ConfigError) as raised:
        case.run(lambda: call(case, layer, x))
    assert str(raised.value) == f"native sparse attention: {message}"


def test_refused_tile(raises_message):
    case = positions(4)
    layer, x, _ = make(case)
    with raises_message(ConfigError):
        case.run(lambda: layer(x, with_details=True, query_tile=16))


def test_refused_without_a_mesh(raises_message):
    layer, x, _ = make(positions(2).alone())
    with (
        hax.axis_mapping({"position": "sequence"}),
        raises_message(ConfigError),
    ):
        layer(x)
