"""Sequence-parallel attention against dense attention in float64: outputs and all gradients."""

import itertools
import random
import re
from dataclasses import dataclass
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import dense_attention
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.attention import dot_product_attention as levanter_attention

from shardplan.attention import dot_product_attention
from shardplan.attention.kernels import splash, splash_blocks
from shardplan.errors import ConfigError
from shardplan.model.attention.chunked_mask import with_chunks
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.runtime import private_jax

Q = ("batch", "kv_head", "q_heads_per_group", "position", "head_size")
K = ("batch", "kv_head", "key_position", "head_size")
V = ("batch", "kv_head", "key_position", "value_size")
HEADS = {"32q/4kv": (4, 8), "12q/2kv": (2, 6), "28q/7kv": (7, 4), "8q/1kv": (1, 8), "16q/16kv": (16, 1)}
MASKS = (
    "causal", "full", "window", "documents", "known documents", "explicit", "prefix", "window and documents",
    "causal and explicit", "offset", "offset by sequence", "integer offset", "traced integer offset", "traced offset",
    "offset, not causal", "window, not causal",
    "window to both sides", "window to both sides and documents",
    "chunk", "chunk and window", "chunk, not causal", "chunk and documents", "chunk and known documents",
)  # fmt: skip
TRACED_MASKS = ("traced integer offset", "traced offset")
"""Masks that are arguments of jit."""
EXTRAS = ("", "sink", "soft cap")
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names("context")
STRATEGIES = {
    1: [("ring", 1)],
    2: [("all_gather", 1), ("ring", 1), ("ulysses", 2)],
    3: [("all_gather", 1), ("ring", 1), ("ulysses", 3)],
    4: [("all_gather", 1), ("ring", 1), ("ulysses", 4), ("hybrid", 2)],
    5: [("all_gather", 1), ("ring", 1), ("ulysses", 5)],
    6: [("all_gather", 1), ("ring", 1), ("ulysses", 6), ("hybrid", 2), ("hybrid", 3)],
    8: [("all_gather", 1), ("ring", 1), ("ulysses", 8), ("hybrid", 2), ("hybrid", 4)],
}


@dataclass(frozen=True)
class Case:
    devices: int
    strategy: str
    ulysses: int
    mask: str
    heads: str
    length: int
    layout: str = "contiguous"
    extra: str = ""
    kernel: str = "blockwise"


def cases():
    """Every strategy on every number of devices; with random masks, heads, lengths, layouts and extras.

    Those on two, four, five and eight devices only with --whole: what follows them is on four and eight, and five is
    odd and prime as three is.
    """
    draw = random.Random(0)
    for devices, ways in STRATEGIES.items():
        for strategy, ulysses in ways:
            layout = draw.choice([each.value for each in SequenceOrder])
            length = draw.choice((48, 37)) if layout == "contiguous" else 12 * devices
            others = draw.choice(MASKS), draw.choice([*HEADS]), length, layout, draw.choice(EXTRAS)
            marks = [pytest.mark.whole] if devices in (2, 4, 5, 8) else []
            yield pytest.param(Case(devices, strategy, ulysses, *others), marks=marks)
    # combinations that a ring may get wrong
    yield Case(4, "ring", 1, "causal", "12q/2kv", 48, "zigzag")
    yield Case(3, "ring", 1, "prefix", "8q/1kv", 48, "striped", "sink")
    yield Case(4, "hybrid", 2, "window and documents", "12q/2kv", 48, "zigzag")
    yield Case(3, "ring", 1, "known documents", "12q/2kv", 48, "documents")
    yield Case(6, "auto", 1, "window", "12q/2kv", 37)
    # masks that only Levanter's constructor makes
    yield Case(3, "ring", 1, "integer offset", "8q/1kv", 37)
    yield Case(4, "hybrid", 2, "traced integer offset", "12q/2kv", 48, "zigzag")
    yield Case(5, "all_gather", 1, "traced offset", "8q/1kv", 37)
    yield Case(4, "ring", 1, "offset, not causal", "8q/1kv", 48, "zigzag")
    yield Case(3, "ring", 1, "window, not causal", "8q/1kv", 48, "striped")
    yield Case(6, "ulysses", 6, "window to both sides", "12q/2kv", 37)
    yield Case(8, "ring", 1, "window to both sides and documents", "8q/1kv", 96, "zigzag")
    # every strategy and every order of positions with chunks
    yield Case(4, "ring", 1, "chunk", "12q/2kv", 48, "zigzag", "sink")
    yield Case(3, "ring", 1, "chunk, not causal", "8q/1kv", 48, "striped")
    yield Case(6, "all_gather", 1, "chunk and window", "12q/2kv", 37)
    yield Case(4, "ulysses", 4, "chunk", "12q/2kv", 37)
    yield Case(4, "hybrid", 2, "chunk and documents", "12q/2kv", 48, "zigzag")
    yield Case(3, "ring", 1, "chunk and documents", "8q/1kv", 48, "striped")
    yield Case(3, "ring", 1, "chunk and known documents", "12q/2kv", 48, "documents")


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]).reshape(1, n), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def document_lengths(length):
    return length // 3, 5, length - length // 3 - 5


def mask_of(name: str, length: int, order: np.ndarray, rng):
    """Return the mask, further arguments, and the allowed pairs bool[B or 1, 1, 1, S, T] by position."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    lengths = document_lengths(length)
    documents = np.stack([np.repeat(np.arange(3), lengths), np.repeat(np.arange(3), lengths[::-1])])
    same = documents[:, None, None, :, None] == documents[:, None, None, None, :]
    in_document = np.concatenate([np.arange(n) for n in [*lengths, *lengths[::-1]]]).reshape(2, length)
    chunks = in_document // 10
    same_chunk = same & (chunks[:, None, None, :, None] == chunks[:, None, None, None, :])
    causal = AttentionMask.causal()

    def named(values, *axes):
        return hax.named(jnp.asarray(values), axes)

    def with_documents(mask):
        segments = named(documents[:, order], "batch", "position")
        return mask.with_segment_ids(segments, segments.rename({"position": "key_position"}))

    def both_sides(radius):
        return AttentionMask(bidirectional_window=radius)

    def chunked(mask):
        return with_chunks(mask, 10, hax.Axis("position", length), named(in_document[:, order], "batch", "position"))

    random_pairs = rng.random((length, length)) < 0.2
    random_pairs[3] = False  # a query without keys
    explicit = AttentionMask.explicit(named(random_pairs[order][:, order], "position", "key_position"))
    return {
        "causal": (causal, {}, i >= j),
        "full": (None, {}, i >= -j),
        "window": (AttentionMask.causal(sliding_window=9), {}, (i >= j) & (i - j < 9)),
        "documents": (with_documents(causal), {}, (i >= j) & same),
        "known documents": (causal, {"documents": lengths}, (i >= j) & same[:1]),
        "explicit": (explicit, {}, random_pairs),
        "prefix": (causal, {"prefix": 11}, (i >= j) | (j < 11)),
        "window and documents": (
            with_documents(AttentionMask.causal(sliding_window=7)), {}, (i >= j) & (i - j < 7) & same,
        ),
        "causal and explicit": (causal & explicit, {}, (i >= j) & random_pairs),
        "offset": (AttentionMask.causal(offset=-5), {}, i - 5 >= j),  # the first queries have no keys
        "offset by sequence": (
            AttentionMask.causal(offset=named(np.array([3, -4]), "batch")), {},
            i + np.array([3, -4])[:, None, None, None, None] >= j,
        ),
        "integer offset": (AttentionMask(is_causal=True, causal_offset=2), {}, i + 2 >= j),
        "traced integer offset": (AttentionMask(is_causal=True, causal_offset=jnp.int32(4)), {}, i + 4 >= j),
        "traced offset": (AttentionMask.causal(offset=-3), {}, i - 3 >= j),
        "offset, not causal": (with_documents(AttentionMask(causal_offset=-5)), {}, same),
        "window, not causal": (AttentionMask(sliding_window=9, causal_offset=3), {}, (i >= j) & (i - j < 9)),
        "window to both sides": (both_sides(7), {}, abs(i - j) <= 7),
        "window to both sides and documents": (with_documents(both_sides(5)), {}, (abs(i - j) <= 5) & same),
        "chunk": (chunked(causal), {}, (i >= j) & (i // 10 == j // 10)),
        "chunk and window": (
            chunked(AttentionMask.causal(sliding_window=4)), {}, (i >= j) & (i - j < 4) & (i // 10 == j // 10),
        ),
        "chunk, not causal": (chunked(None), {}, i // 10 == j // 10),
        "chunk and documents": (chunked(with_documents(causal)), {}, (i >= j) & same_chunk),
        "chunk and known documents": (chunked(causal), {"documents": lengths}, (i >= j) & same_chunk[:1]),
    }[name]  # fmt: skip


def dense_in_jax(q, k, v, allowed, soft_cap, sink):
    """Dense attention in the dtype of its inputs, softmax in float32: the reference for bfloat16."""
    q, k, v = q.rearrange(Q).array, k.rearrange(K).array, v.rearrange(V).array
    scores = jnp.einsum("bngsk,bntk->bngst", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(allowed, scores, -1e30)
    extra = jnp.full((*scores.shape[:-1], 1), -jnp.inf)
    if sink is not None:
        extra = jnp.broadcast_to(sink.array[None, :, :, None, None], extra.shape)
    # a query without allowed keys has output 0
    weights = (jax.nn.softmax(jnp.concatenate([scores, extra], -1), -1)[..., :-1] * allowed).astype(v.dtype)
    return hax.named(jnp.einsum("bngst,bntv->bngsv", weights, v), (*Q[:4], "value_size"))


def check(case: Case, dtype=jnp.float32, is_dense=False):
    """Return the largest errors of the output and of each gradient against float64, relative to the largest value."""
    rng = np.random.default_rng(0)
    n, g = HEADS[case.heads]
    shapes = [(2, n, g, case.length, 16), (2, n, case.length, 16), (2, n, case.length, 24)]
    q, k, v = (np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64) for shape in shapes)
    out_gradient = rng.normal(size=(*shapes[0][:-1], 24))
    sink = rng.normal(size=(n, g)) if case.extra == "sink" else None
    cap = 3.0 if case.extra == "soft cap" else None
    ring = case.devices // case.ulysses if case.strategy != "ulysses" else 1
    known = document_lengths(case.length) if "known documents" in case.mask else None
    layout = SequenceLayout(case.length, ring, case.ulysses, case.layout, known)
    order = layout.positions()[: case.length]
    mask, arguments, allowed = mask_of(case.mask, case.length, order, rng)
    expected = dense_attention(q, k, v, allowed, out_gradient, cap, sink)

    def run(mask, q, k, v, sink):
        if is_dense:
            return dense_in_jax(q, k, v, allowed[..., order, :][..., order], cap, sink)
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, mask, strategy=case.strategy, ulysses=case.ulysses,
            layout=case.layout, axis_mapping={"position": "model"}, attn_sink=sink, logits_soft_cap=cap, block=8,
            kernel=case.kernel, **arguments,
        )  # fmt: skip

    def in_order(x, axes):
        at = next((i for i, name in enumerate(axes) if "position" in name), None)
        values = x if at is None else np.take(x, order, at)
        return hax.named(jnp.asarray(values, dtype), axes)

    inputs = [in_order(x, axes) for x, axes in ((q, Q), (k, K), (v, V))]
    inputs.append(None if sink is None else hax.named(jnp.asarray(sink, jnp.float32), Q[1:3]))
    weights = in_order(out_gradient, (*Q[:4], "value_size")).astype(jnp.float32)

    def loss(inputs, mask):
        out = run(mask, *inputs)
        return hax.sum(out.astype(jnp.float32) * weights).scalar(), out

    gradient = jax.value_and_grad(loss, has_aux=True)
    with jax.set_mesh(mesh_of(case.devices)):
        if case.mask in TRACED_MASKS:
            (_, out), gradients = jax.jit(gradient)(inputs, mask)
        else:
            (_, out), gradients = jax.jit(lambda inputs: gradient(inputs, mask))(inputs)
    assert out.array.dtype == dtype
    inverse = np.argsort(order)

    def error(actual, wanted):
        at = next((i for i, axis in enumerate(actual.axes) if "position" in axis.name), None)
        values = np.asarray(actual.array, np.float64)
        values = values if at is None else np.take(values, inverse, at)
        return np.abs(values - wanted).max() / np.abs(wanted).max()

    gradients = [each for each in gradients if each is not None]
    return error(out, expected.out), [error(x, y) for x, y in zip(gradients, expected.gradients, strict=False)]


def matrix():
    """Every strategy on every number of devices, with every mask, every number of heads and every length."""
    ways = [(devices, *way) for devices, each in STRATEGIES.items() for way in each]
    for way, mask, heads, length in itertools.product(ways, MASKS, HEADS, (48, 37)):
        yield pytest.param(Case(*way, mask, heads, length), marks=pytest.mark.whole)


BFLOAT16_CASES = (
    Case(4, "hybrid", 2, "causal", "8q/1kv", 48, "zigzag"),
    Case(3, "ring", 1, "window and documents", "12q/2kv", 48, "striped", "sink"),
    Case(8, "ulysses", 8, "full", "32q/4kv", 48),  # each key head is on two devices
)


def pytest_generate_tests(metafunc):
    """Parametrize the conformance tests; the thousands of cases of the matrix are made with --whole only."""
    whole = [*matrix()] if metafunc.config.getoption("--whole") else []
    if metafunc.function is test_float32:
        metafunc.parametrize("case", [*cases(), *whole], ids=str)
    if metafunc.function is test_bfloat16:
        metafunc.parametrize("case", [*BFLOAT16_CASES, *whole[::7]], ids=str)  # every strategy with every mask


def test_float32(case):
    out, gradients = check(case)
    assert out <= 2e-6 and max(gradients) <= 1e-5, (out, gradients)


def test_bfloat16(case):
    """The error is at most 1.5 times that of dense attention in bfloat16."""
    (out, gradients), (dense, dense_gradients) = check(case, jnp.bfloat16), check(case, jnp.bfloat16, is_dense=True)
    assert out <= 1.5 * dense
    for gradient, dense_gradient in zip(gradients, dense_gradients, strict=True):
        assert gradient <= 1.5 * dense_gradient


def test_two_mesh_axes_and_heads_on_a_third():
    """A ring along one mesh axis, Ulysses along the other; arrays with axes in another order; under named_jit."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    mapping = {"position": ("replica", "data"), "kv_head": "model"}
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 4, 2, 32, 16), (2, 4, 32, 16), (2, 4, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((2, 4, 2, 32, 24)))
    names = ("q_heads_per_group", "position", "batch", "head_size", "kv_head")
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]
    arrays[0] = arrays[0].rearrange(names)

    def run(q, k, v):
        return dot_product_attention(
            "position",
            "key_position",
            "head_size",
            q,
            k,
            v,
            AttentionMask.causal(),
            strategy="hybrid",
            ulysses=2,
            block=8,
        )

    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        out = hax.named_jit(run, axis_resources=mapping)(*arrays)
        assert out.array.sharding.spec == hax.partitioning.pspec_for_axis(out.axes, mapping)
        actual = out.rearrange((*Q[:4], "value_size")).array
    np.testing.assert_allclose(np.asarray(actual), expected.out, atol=2e-6)


@pytest.mark.parametrize(("strategy", "u"), [("ring", 1), ("ulysses", 4)])
def test_names_of_axes_mean_nothing(strategy, u):
    """Heads are the last axis that keys share with queries, or those that the caller names; never those of a name."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 4, 2, 32, 16), (2, 4, 32, 16), (2, 4, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((2, 4, 2, 32, 24)))
    names = {
        "batch": "heads", "kv_head": "batch", "q_heads_per_group": "model", "position": "embed", "key_position": "x",
        "head_size": "kv_head", "value_size": "data",
    }  # fmt: skip
    arrays = [
        hax.named(jnp.asarray(x, jnp.float32), [names[axis] for axis in axes])
        for x, axes in ((q, Q), (k, K), (v, V))
    ]  # fmt: skip
    last = arrays[1].rearrange(("batch", "heads", "x", "kv_head")), arrays[2].rearrange(("batch", "heads", "x", "data"))
    for keys, heads in ((arrays[1:], None), (last, "batch")):
        with jax.set_mesh(mesh_of(4)):
            options = {
                "strategy": strategy,
                "ulysses": u,
                "heads": heads,
                "axis_mapping": {"embed": "model"},
                "block": 8,
            }
            attend = partial(dot_product_attention, "embed", "x", "kv_head", mask=AttentionMask.causal(), **options)
            out = jax.jit(attend)(arrays[0], *keys)
        actual = out.rearrange([names[axis] for axis in (*Q[:4], "value_size")]).array
        np.testing.assert_allclose(np.asarray(actual), expected.out, atol=2e-6)


@pytest.mark.parametrize(("strategy", "u"), [("ring", 1), ("hybrid", 2), ("ulysses", 8)])
def test_mesh_axes_in_another_order_than_the_mesh(strategy, u):
    """Positions on (model, data) of a mesh (data, model); values have another head size under the same name."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 4, 32, 16), (1, 2, 32, 16), (1, 2, 32, 24)))
    expected = dense_attention(q, k, v, np.tri(32, dtype=bool), np.zeros((1, 2, 4, 32, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]

    def run(q, k, v):
        mapping = {"position": ("model", "data")}
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), strategy=strategy, ulysses=u,
            axis_mapping=mapping, block=8,
        )  # fmt: skip

    with jax.set_mesh(mesh):
        out = jax.jit(run)(*arrays)
    np.testing.assert_allclose(np.asarray(out.array), expected.out, atol=2e-6)


@pytest.mark.parametrize(("policy", "repeated"), [(jax.checkpoint_policies.nothing_saveable, 3), (SAVE_ATTENTION, 0)])
def test_checkpoint_policy_saves_residuals(policy, repeated):
    """With outputs saved by name the gradient repeats no hop of the forward pass. On four devices a pass has three hops
    of keys and of values; the backward pass has them too, and four of both gradients."""
    q, k = (hax.zeros(hax.make_axes(kv_head=2, head_size=16, **{name: 8})) for name in ("position", "key_position"))

    @partial(jax.checkpoint, policy=policy)
    def attend(q, k):
        names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
        return dot_product_attention(*names, q, k, k, strategy="ring", axis_mapping=mapping).array

    with jax.set_mesh(mesh_of(4)):
        text = str(jax.make_jaxpr(jax.grad(lambda *inputs: attend(*inputs).sum(), argnums=(0, 1)))(q, k))
    assert text.count("ppermute[") == 2 * (3 + repeated + 3 + 3 + 1)


def test_explicit_mask_of_padding_keys():
    """The mask has only the axes of batch and keys, and the sink takes no weight."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24)))
    is_token = np.arange(16) < np.array([9, 0])[:, None]
    expected = dense_attention(q, k, v, is_token[:, None, None, None], np.zeros((2, 2, 4, 16, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, (*V[:3], "value_size")))]
    mask, sink = hax.named(jnp.asarray(is_token), ("batch", "key_position")), hax.full(arrays[0].axes[1:3], -jnp.inf)
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
    arguments = {"strategy": "ring", "attn_sink": sink, "axis_mapping": mapping}
    attend = jax.jit(lambda *arrays: dot_product_attention(*names, *arrays, mask, **arguments))
    with jax.set_mesh(mesh_of(4)):
        out = attend(*arrays)
    np.testing.assert_allclose(np.asarray(out.array), expected.out, atol=2e-6)


def test_gradients_without_keys_and_sinks():
    """Gradients are not NaN where queries have no keys and sinks take no weight."""
    rng = np.random.default_rng(1)
    q, k, v, out_gradient = (
        rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24), (2, 2, 4, 16, 24))
    )
    expected = dense_attention(q, k, v, np.tri(16, k=-3, dtype=bool), out_gradient)
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]
    sink = hax.full(arrays[0].axes[1:3], -jnp.inf)
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}

    def loss(q, k, v, sink):
        mask = AttentionMask.causal(offset=-3)
        arguments = {"strategy": "ring", "attn_sink": sink, "axis_mapping": mapping}
        return (dot_product_attention(*names, q, k, v, mask, **arguments).array * out_gradient).sum()

    with jax.set_mesh(mesh_of(4)):
        *gradients, sink_gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays, sink)
    for gradient, wanted in zip(gradients, expected.gradients, strict=False):
        np.testing.assert_allclose(gradient.array, wanted, atol=1e-5)
    assert not sink_gradient.array.any()


@pytest.mark.parametrize(
    ("names", "hardware"), [(("data", "fsdp", "sequence", "tensor"), "v5p-16"), (("dp", "sp"), None)]
)
def test_auto_on_meshes_with_other_axis_names(names, hardware):
    """Names as in MaxText; positions on the last axis but one."""
    sizes = [1] * (len(names) - 2) + [4, 2]
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=size) for size in ((2, 2, 4, 16, 16), (2, 2, 16, 16), (2, 2, 16, 24)))
    expected = dense_attention(q, k, v, np.tri(16, dtype=bool), np.zeros((2, 2, 4, 16, 24)))
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, V))]

    @jax.jit
    def attend(q, k, v):
        return dot_product_attention(
            "position", "key_position", "head_size", q, k, v, AttentionMask.causal(), strategy="auto",
            axis_mapping={"position": names[-2], "kv_head": names[-1]}, hardware=hardware,
        ).array  # fmt: skip

    with jax.set_mesh(mesh):
        out = attend(*arrays)
    np.testing.assert_allclose(np.asarray(out), expected.out, atol=2e-6)


def test_errors():
    mesh = mesh_of(4)
    x, y = (
        hax.zeros(hax.make_axes(**{"kv_head": 2, name: 8, "head_size": 16})) for name in ("position", "key_position")
    )
    mapping, short = {"position": "model"}, hax.ones(hax.make_axes(position=4, key_position=8)) > 0
    allowed = hax.ones(hax.make_axes(position=8, key_position=8)) > 0
    by_head = AttentionMask.causal().with_segment_ids(hax.zeros(hax.make_axes(kv_head=2, position=8), dtype=int))
    for arguments, message in (
        ({"strategy": "rings"}, "attention strategy is 'rings'; did you mean 'ring'"),
        (
            {"strategy": "none"},
            "strategy none, but 4 devices shard position; use all_gather, ring, ulysses, hybrid or auto",
        ),
        ({"layout": "zig"}, "attention layout is 'zig'; did you mean 'zigzag'"),
        ({"strategy": "hybrid", "ulysses": 3}, "ulysses 3 does not divide the 4 devices along position"),
        ({"strategy": "hybrid", "ulysses": 0}, "ulysses 0 does not divide the 4 devices along position"),
        ({"mask": short}, "a mask or sink has the axis position"),
        ({"documents": [3, 4]}, "documents of 3, 4 positions do not add up to the 8 of the sequence"),
        (
            {"documents": [3, 4], "strategy": "auto"},
            "documents of 3, 4 positions do not add up to the 8 of the sequence",
        ),
        ({"strategy": "ring", "ulysses": 2}, "ulysses 2 is for the strategy hybrid; the strategy ring has ulysses 1"),
        (
            {"layout": SequenceLayout(8, 8, 1, "zigzag"), "strategy": "auto"},
            "ring 8 x ulysses 1, but 4 devices shard positions",
        ),
        ({"strategy": "auto", "hardware": "v5p-16"}, "hardware v5p-16 has 8 devices, the mesh 4"),
        ({"strategy": "auto", "hardware": "h100-4"}, "unknown generation 'h100'"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        (
            {"mask": np.ones((8, 8), bool)},
            "the mask is a ndarray; it must be levanter.layers.attention.AttentionMask, or",
        ),
        (
            {"mask": AttentionMask(is_causal=True, causal_offset=1.5)},
            "causal_offset has dtype float32; it must be an int",
        ),
        (
            {"mask": AttentionMask(is_causal=True, causal_offset=np.array([1, 2]))},
            "causal_offset is array([1, 2]); it must be an integer, or a named array of integers",
        ),
        ({"mask": allowed.astype(float)}, "the explicit mask has dtype float32; it must be bool"),
        ({"prefix": jnp.int32(3)}, "prefix must be one number, known while tracing"),
        ({"axis_mapping": {"position": ("model", "model")}}, "mapped to one mesh axis twice: model, model"),
        (
            {"axis_mapping": {"position": "modle"}},
            "mapped to 'modle', which is no axis of the mesh; did you mean 'model'",
        ),
        ({"axis_mapping": {"position": "model", "kv_head": "model"}}, "kv_head and position are both mapped to model"),
        ({"axis_mapping": {"kv_head": "model"}}, "kv_head (2) is not divisible by the 4 devices that shard it"),
        ({"mask": by_head}, "a mask or sink has the axis kv_head (2); valid: position (8)"),
        (
            {"layout": SequenceLayout(8, 4), "axis_mapping": {"pos": "model"}},
            "no mesh axis of several devices shards posi",
        ),
        ({"kernel": "splash", "strategy": "ring"}, "each ring index has 2 positions, which must be a multiple of 128"),
        (
            {"kernel": "splash", "mask": allowed},
            "kernel splash does not support explicit masks; use the kernel blockwise",
        ),
    ):
        with jax.set_mesh(mesh), pytest.raises(ConfigError, match=re.escape(message)):
            dot_product_attention(
                "position", "key_position", "head_size", x, y, y, **{"axis_mapping": mapping, **arguments}
            )
    with (
        jax.set_mesh(jax.make_mesh((4,), ("model",))),
        pytest.raises(ConfigError, match="of type Explicit; make it with AxisType"),
    ):
        dot_product_attention("position", "key_position", "head_size", x, y, y, axis_mapping=mapping)
    with pytest.raises(ConfigError, match="position is mapped, but no mesh is set"):
        dot_product_attention("position", "key_position", "head_size", x, y, y, axis_mapping=mapping)
    with pytest.raises(ConfigError, match="both name their positions position; rename the positions of keys"):
        dot_product_attention("position", "position", "head_size", x, x, x)
    wide = y.broadcast_axis(hax.Axis("batch", 2))
    for queries, actual in ((x, "none"), (x.broadcast_axis(hax.Axis("batch", 1)), "size 1")):
        message = f"queries must have the axis batch of size 2, as keys do; they have {actual}"
        with pytest.raises(ConfigError, match=message):
            dot_product_attention("position", "key_position", "head_size", queries, wide, wide)
    with pytest.raises(
        ConfigError, match="ulysses exchanges heads, but queries and keys share none; use all_gather or"
    ):
        dot_product_attention("position", "key_position", "head_size", x, y, y, heads=(), strategy="ulysses")
    with pytest.raises(ConfigError, match=r"attention: heads 'kv_heads': did you mean 'kv_head'\?"):
        dot_product_attention("position", "key_position", "head_size", x, y, y, heads="kv_heads")
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="keys and values alone take more than the 15"):
        many = jax.ShapeDtypeStruct((2**16, 2**16, 128), jnp.bfloat16)
        q, k = (
            hax.NamedArray(many, hax.make_axes(**{"kv_head": 2**16, name: 2**16, "head_size": 128}))
            for name in ("position", "key_position")
        )
        dot_product_attention("position", "key_position", "head_size", q, k, k, axis_mapping=mapping, hardware="v5e-4")
    with pytest.raises(
        ConfigError, match="scaling_factor is traced, but must be known while tracing; multiply queries by"
    ):
        names = "position", "key_position", "head_size"
        jax.jit(lambda scale: dot_product_attention(*names, x, y, y, scaling_factor=scale).array)(0.1)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(2, "all_gather", 1, "window and documents", "12q/2kv", 512, "contiguous", "", "splash"),
            marks=pytest.mark.whole,
        ),
        pytest.param(
            Case(4, "ulysses", 4, "documents", "8q/1kv", 512, "contiguous", "sink", "splash"), marks=pytest.mark.whole
        ),
        Case(3, "ring", 1, "causal", "12q/2kv", 384, "zigzag", "", "splash"),
        pytest.param(
            Case(3, "ring", 1, "window", "8q/1kv", 384, "striped", "soft cap", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(
            Case(4, "hybrid", 2, "offset", "12q/2kv", 512, "contiguous", "sink", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(Case(3, "ring", 1, "prefix", "8q/1kv", 384, "contiguous", "", "splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(2, "ring", 1, "known documents", "8q/1kv", 256, "contiguous", "", "splash"), marks=pytest.mark.whole
        ),
        pytest.param(Case(2, "ring", 1, "full", "8q/1kv", 256, "contiguous", "", "splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(3, "ring", 1, "window to both sides", "8q/1kv", 384, kernel="splash"), marks=pytest.mark.whole
        ),
        Case(2, "all_gather", 1, "chunk", "8q/1kv", 256, kernel="splash"),
        pytest.param(Case(3, "ring", 1, "chunk", "12q/2kv", 384, "zigzag", kernel="splash"), marks=pytest.mark.whole),
        pytest.param(
            Case(2, "all_gather", 1, "chunk and documents", "12q/2kv", 512, kernel="splash"), marks=pytest.mark.whole
        ),
        pytest.param(
            Case(3, "ring", 1, "chunk and known documents", "8q/1kv", 384, "documents", kernel="splash"),
            marks=pytest.mark.whole,
        ),
    ],
    ids=str,
)
def test_splash(monkeypatch, case):
    """The TPU kernels in JAX's interpreter, with blocks of 128, so that some hops have no block."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash_blocks, "KERNEL_BLOCK", 128)
    out, gradients = check(case)
    assert out <= 1e-5 and max(gradients) <= 1e-5, (out, gradients)


@pytest.mark.whole
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, "ring", 1, "causal", "8q/1kv", 512, "zigzag", "", "splash"), marks=pytest.mark.whole),
        Case(2, "ulysses", 2, "documents", "8q/1kv", 512, "contiguous", "sink", "splash"),
    ],
    ids=str,
)
def test_splash_in_chunks(monkeypatch, case):
    """Queries are split into chunks when scalar memory cannot hold all blocks of a long sequence."""
    monkeypatch.setattr(splash, "MAX_BLOCKS", 2)
    monkeypatch.setattr(splash_blocks, "KERNEL_BLOCK", 128)
    monkeypatch.setattr(splash, "INTERPRET", True)
    out, gradients = check(case)
    assert out <= 1e-5 and max(gradients) <= 1e-5, (out, gradients)


@pytest.mark.parametrize("max_blocks", [splash.MAX_BLOCKS, 2])
def test_splash_without_log_sum_exp(monkeypatch, max_blocks):
    """The kernel does not write it if it is unused; gradients of a function traced so, as scans are, are right too."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash_blocks, "KERNEL_BLOCK", 128)
    monkeypatch.setattr(splash, "MAX_BLOCKS", max_blocks)
    rng = np.random.default_rng(0)
    q, k, out_gradient = (rng.normal(size=(1, 1, *g, 256, 32)) for g in ((2,), (), (2,)))
    expected = dense_attention(q, k, k, np.tri(256, dtype=bool), out_gradient)
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K))]

    @jax.jit
    def attend(q, k):
        names, mapping = ("position", "key_position", "head_size"), {"position": "model"}
        arguments = {"strategy": "all_gather", "kernel": "splash", "axis_mapping": mapping}
        return dot_product_attention(*names, q, k, k, AttentionMask.causal(), **arguments).array

    with jax.set_mesh(mesh_of(2)):
        assert "no_residuals" in str(jax.make_jaxpr(attend)(*arrays))
        out, transpose = jax.vjp(attend, *arrays)
        q_gradient, k_gradient = transpose(jnp.asarray(out_gradient, jnp.float32))
    np.testing.assert_allclose(out, expected.out, atol=1e-5)
    np.testing.assert_allclose(q_gradient.array, expected.gradients[0], atol=1e-4)
    np.testing.assert_allclose(k_gradient.array, expected.gradients[1] + expected.gradients[2], atol=1e-4)


def test_levanters_splash_with_sharded_positions(monkeypatch):
    """It is right, and gathers the keys on every device."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    kernels = private_jax.splash
    monkeypatch.setattr(kernels, "make_splash_mha", partial(kernels.make_splash_mha, interpret=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 2, 512, 128), (1, 2, 512, 128), (1, 2, 512, 128)))
    expected = dense_attention(q, k, v, np.tri(512, dtype=bool), np.zeros(q.shape)).out
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]
    names, mapping = ("position", "key_position", "head_size"), {"position": "model"}

    def levanter_splash(q, k, v):
        return levanter_attention(*names, q, k, v, AttentionMask.causal(), attn_backend=AttentionBackend.SPLASH)

    def shardplan_splash(q, k, v):
        return dot_product_attention(*names, q, k, v, AttentionMask.causal(), strategy="all_gather", kernel="splash")

    with jax.set_mesh(mesh_of(4)), hax.axis_mapping(mapping):
        functions = levanter_splash, shardplan_splash
        theirs, ours = (hax.named_jit(each)(*arrays).rearrange(Q).array for each in functions)
    np.testing.assert_allclose(theirs, expected, atol=1e-5)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("axis", ["q_heads_per_group", "head_size"])
def test_levanters_splash_with_sharded_heads_of_a_group_is_wrong(monkeypatch, axis):
    """It computes on each device as if that had all heads of a group, or everything along head_size."""
    kernels = private_jax.splash
    monkeypatch.setattr(kernels, "make_splash_mha", partial(kernels.make_splash_mha, interpret=True))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=size) for size in ((1, 2, 4, 256, 256), (1, 2, 256, 256), (1, 2, 256, 256)))
    expected = dense_attention(q, k, v, np.tri(256, dtype=bool), np.zeros(q.shape)).out
    arrays = [hax.named(jnp.asarray(x, jnp.float32), axes) for x, axes in ((q, Q), (k, K), (v, K))]

    def levanter_splash(q, k, v):
        names = "position", "key_position", "head_size"
        return levanter_attention(*names, q, k, v, AttentionMask.causal(), attn_backend=AttentionBackend.SPLASH)

    with jax.set_mesh(mesh_of(2)), hax.axis_mapping({axis: "model"}):
        result = hax.named_jit(levanter_splash)(*arrays).rearrange(Q).array
    assert np.abs(result - expected).max() > 0.5
