"""Levanter's `dot_product_attention` replaced by ours: masks, arguments, order of axes and derivatives."""

import inspect
import itertools
import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.attention import dot_product_attention as levanter_attention

from shardplan.attention import dot_product_attention
from shardplan.attention.masking import make_mask_spec
from shardplan.errors import ConfigError
from shardplan.model.attention.chunked_mask import with_chunks

POS, KEY_POS, HEAD_SIZE, HEADS, BATCH = (
    hax.Axis(name, size)
    for name, size in (("position", 16), ("key_position", 16), ("d", 8), ("h", 2), ("b", 3))
)  # fmt: skip
MAPPING = {"position": "model"}
ONLY_REVERSE = (
    "attention has reverse-mode derivatives only; use jax.grad, jax.vjp or jax.jacrev instead of jax.jvp, jax.jacfwd "
    "or jax.linearize"
)


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("model",), axis_types=(AxisType.Auto,))


def random_arrays(*axes):
    return [hax.random.normal(jax.random.PRNGKey(i), each) for i, each in enumerate(axes)]


def masks():
    """Every combination of causality, offset, windows and chunks."""
    values = (True, False), (None, 0, -5, 2), (None, 1, 4), (None, 0, 3)
    for causal, offset, window, radius in itertools.product(*values):
        mask = AttentionMask(is_causal=causal, causal_offset=offset, sliding_window=window, bidirectional_window=radius)
        yield mask
        yield with_chunks(mask, 6, POS)


def test_patterns_are_levanters_masks():
    """`materialize` of the installed Levanter is the definition of a mask."""
    positions = np.arange(16)
    count = 0
    for mask in masks():
        expected = mask.materialize(POS, KEY_POS)
        pattern = make_mask_spec(mask).pattern
        actual = np.broadcast_to(pattern.mask(positions, positions), (16, 16))
        expected = np.ones((16, 16), bool) if expected is None else expected.rearrange((POS, KEY_POS)).array
        assert (actual == expected).all(), mask
        assert pattern.density(16) == actual.mean(), mask
        for start, key_start in itertools.product(range(0, 16, 4), repeat=2):
            block = actual[start : start + 4, key_start : key_start + 4]
            all_allowed, any_allowed = pattern.allows_block(start, start + 3, key_start, key_start + 3)
            assert all_allowed == block.all(), (mask, start, key_start)
            # ranges of several chunks may have no pair that is allowed, although nothing says so
            assert any_allowed == block.any() or (any_allowed and pattern.chunk), (mask, start, key_start)
        count += 1
    assert count >= 24


def test_chunks_are_added_once_and_after_documents(raises_message):
    mask = with_chunks(AttentionMask.causal(), 4, POS)
    with raises_message(ConfigError):
        with_chunks(None, 0, POS)
    with raises_message(ConfigError):
        with_chunks(mask, 2, POS)
    with raises_message(ConfigError):
        mask.with_segment_ids(hax.zeros(POS, dtype=int))


@pytest.mark.parametrize("offset", [2, np.int64(2), jnp.int32(2), hax.named(jnp.asarray(2), ())], ids=repr)
def test_offsets_of_every_type(offset):
    pattern = make_mask_spec(AttentionMask(is_causal=True, causal_offset=offset)).pattern
    assert (pattern.causal, pattern.causal_offset) == (True, 2)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize(
    ("offset", "is_traced"),
    [
        *((offset, is_traced) for offset in (2**31 - 1, 2**31 - 5, -(2**31)) for is_traced in (False, True)),
        (2**40, False),  # no array of 32 bits holds these
        (-(2**40), False),
    ],
)
def test_offsets_beyond_int32(offset, is_traced, strategy):
    """A mask that allows everything, or nothing: no sum with a position may overflow."""
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))

    def attend(offset):
        mask = AttentionMask(is_causal=True, causal_offset=offset)
        arguments = (POS, KEY_POS, HEAD_SIZE, q, k, v, mask)
        return dot_product_attention(*arguments, axis_mapping=MAPPING, strategy=strategy)

    expected = levanter_attention(POS, KEY_POS, HEAD_SIZE, q, k, v).array if offset > 0 else np.zeros(q.array.shape)
    with jax.set_mesh(mesh_of(4)):
        out = jax.jit(attend)(jnp.int32(offset)) if is_traced else jax.jit(lambda: attend(offset))()
    np.testing.assert_allclose(out.array, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("query", "devices", "options"),
    [
        ((POS, HEADS, HEAD_SIZE), 4, {"strategy": "ring"}),
        ((HEAD_SIZE, BATCH, POS, HEADS), 3, {"strategy": "all_gather"}),
        ((HEADS, HEAD_SIZE, POS, hax.Axis("group", 2)), 4, {"strategy": "hybrid", "ulysses": 2}),
    ],
    ids=["position first", "head size first", "head size in the middle"],
)
def test_results_and_axes_are_levanters(query, devices, options):
    """The axes of the query but its head size, in their order, then the head size of values, and the same gradients."""
    value_size = hax.Axis("v", 5)
    keys = [axis for axis in query if axis not in (POS, HEAD_SIZE) and axis.name != "group"]
    q, k, v = random_arrays(query, (*keys, KEY_POS, HEAD_SIZE), (KEY_POS, *keys, value_size))
    mask = AttentionMask(is_causal=True, causal_offset=1)

    def outputs(attend):
        def loss(arrays):
            out = attend(POS, KEY_POS, HEAD_SIZE, *arrays, mask)
            return (out.array**2).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))([q, k, v])

    def ours(*arguments):
        return dot_product_attention(*arguments, axis_mapping=MAPPING, **options)

    (_, expected), expected_gradients = outputs(levanter_attention)
    with jax.set_mesh(mesh_of(devices)):
        (_, out), gradients = outputs(ours)
    assert out.axes == expected.axes and out.axes[-1] == value_size
    np.testing.assert_allclose(out.array, expected.array, atol=2e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient.array, expected_gradient.array, atol=1e-5)


def test_arguments_are_levanters():
    """Every argument of the installed Levanter's function is one of ours: same place, same default."""
    theirs, ours = (inspect.signature(each).parameters for each in (levanter_attention, dot_product_attention))
    assert not {*theirs} - {*ours}
    positional = [name for name, each in theirs.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [*ours][: len(positional)] == positional
    assert all(ours[name].default == each.default for name, each in theirs.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": 1}, "attention: bias is not supported; leave it out, or use Levanter's dot_product_attention, which"),
        (
            {"dropout": 0.1, "inference": False},
            "attention: dropout is 0.1, and is not supported; set it to 0, or inference to True",
        ),
        ({"use_flash": False}, "attention: use_flash is False, but scores are always computed in blocks; leave it out"),
        (
            {"attn_backend": AttentionBackend.VANILLA},
            "attention: attn_backend is 'vanilla', one of Levanter's implementations; leave it out, or choose kernel: "
            "blockwise or splash",
        ),
        ({"attn_backend": "jaxflash"}, "attention: attn_backend is 'jaxflash'; did you mean 'jax_flash'?"),
        (
            {"precision": "highest", "kernel": "splash"},
            "attention: precision is highest, which the splash kernel cannot choose; leave it out, or use the kernel "
            "blockwise, which computes products at the highest precision",
        ),
        (
            {"block": 4, "flash_block_size": 8},
            "attention: block is 4 and flash_block_size is 8, which mean the same; leave one out",
        ),
        ({"flash_block_size": 0}, "attention: flash_block_size is 0; it must be at least 1"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))
    with pytest.raises(ConfigError, match=re.escape(message)):
        dot_product_attention(POS, KEY_POS, HEAD_SIZE, q, k, v, **arguments)


def test_an_axis_that_is_absent_is_named():
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))
    for roles, message in (
        (("pos", KEY_POS, HEAD_SIZE), "attention: QPos is pos, which is no axis of query; valid: d, h, position"),
        ((POS, "words", HEAD_SIZE), "attention: KPos is words, which is no axis of key; valid: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            dot_product_attention(*roles, q, k, v)


def test_positions_on_several_axes_are_refused(raises_message):
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))
    with raises_message(ConfigError):
        dot_product_attention(POS, ("key_position", "h"), HEAD_SIZE, q, k, v)


def test_arguments_that_change_nothing():
    """What Levanter's own modules pass: a key for dropout, a precision, a block size, a default backend."""
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))
    rest = {
        "precision": jax.lax.Precision.HIGHEST, "use_flash": True, "attn_backend": AttentionBackend.DEFAULT,
        "flash_block_size": 8, "dropout": 0.1, "inference": True, "prng": jax.random.PRNGKey(0),
    }  # fmt: skip
    attend = jax.jit(lambda *arrays: dot_product_attention(POS, KEY_POS, HEAD_SIZE, *arrays, **rest))
    expected = levanter_attention(POS, KEY_POS, HEAD_SIZE, q, k, v)
    np.testing.assert_allclose(attend(q, k, v).array, expected.array, atol=2e-6)


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jacfwd(jax.jit(f))(x),
        lambda f, x: jax.linearize(jax.jit(f), x)[1](x),
        lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(jnp.stack([x, x])),
    ],
    ids=["jvp", "jvp in jit", "jacfwd of jit", "linearize", "jvp in vmap"],
)
def test_forward_mode_is_refused(differentiate):
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))

    def attend(x):
        query = hax.named(x, q.axes)
        return dot_product_attention(POS, KEY_POS, HEAD_SIZE, query, k, v, axis_mapping=MAPPING, strategy="ring").array

    with jax.set_mesh(mesh_of(2)), pytest.raises(ConfigError) as error:
        differentiate(attend, q.array)
    assert str(error.value) == ONLY_REVERSE


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
        lambda f: jax.grad(lambda x: (jax.grad(lambda x: jax.vmap(f)(x).sum())(x) ** 2).sum()),
        lambda f: lambda x: jax.jvp(jax.grad(lambda x: jax.vmap(f)(x).sum()), (x,), (jnp.cos(x),))[1],
    ],
    ids=["gradient of vmap", "second derivative", "forward over reverse"],
)
def test_reverse_mode_with_other_transformations(differentiate):
    """Without a mesh, because only the order of transformations matters."""
    q, k, v = random_arrays((POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE), (KEY_POS, HEADS, HEAD_SIZE))

    def derivative_of(attend):
        def f(x):
            return (
                attend(POS, KEY_POS, HEAD_SIZE, hax.named(x, q.axes), k, v, AttentionMask.causal()).array ** 2
            ).sum()

        return jax.jit(differentiate(f))(jnp.stack([q.array, 2 * q.array]))

    actual, expected = map(derivative_of, (dot_product_attention, levanter_attention))
    assert abs(actual - expected).max() <= 5e-6 * abs(expected).max()
