"""Cases of sequence-parallel attention: their masks and arrays, and their errors against attention in float64."""

from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from dense_attention import dense_attention
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention
from shardplan.model.attention.chunked_mask import with_chunks
from shardplan.positions.sequence_layout import SequenceLayout

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
