"""Attention of the decoder by Levanter's function and by every strategy, against a dense softmax in float64."""

import dataclasses
from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_attention import dense_attention
from haliax import Axis
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask

from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention, Kernel
from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.errors import ConfigError
from shardplan.execution.planned_attention import planned_attention
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.positions.sequence_layout import SequenceLayout

LENGTH, DEVICES, CHUNK = 48, 4, 10
DOCUMENTS = (23, 25)
"""Lengths of the documents, where there are any: none begins where a chunk of the sequence does."""
PLAIN = GroupedAttention(4, 2, 8)
PARTS = {
    "chunk": dataclasses.replace(PLAIN, chunk=CHUNK),
    "window and chunk": dataclasses.replace(PLAIN, window=6, chunk=CHUNK),
    "sinks": dataclasses.replace(PLAIN, has_sinks=True),
    "wider values": dataclasses.replace(PLAIN, value_head_size=12),
    "all": dataclasses.replace(PLAIN, chunk=CHUNK, has_sinks=True, value_head_size=6),
}
METHODS = [
    None, AttentionPlan("all_gather", 1, 4), AttentionPlan("ring", 1, 4, "zigzag"), AttentionPlan("ring", 1, 4),
    AttentionPlan("ulysses", 4), AttentionPlan("hybrid", 2, 2, "zigzag"), AttentionPlan("ring", 1, 4, "striped"),
]  # fmt: skip
"""Methods of a plan; None for Levanter's function."""


def expected(layer, x, allowed, weights):
    """The output of a layer in float64, and the gradients of its queries' weight, values' weight and sinks."""
    q_weight, k_weight, v_weight, o_weight = (
        np.asarray(getattr(layer, name).weight.array, np.float64) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    o_weight = o_weight.reshape(o_weight.shape[0], *q_weight.shape[:2], -1)
    q = np.einsum("bse,ngke->bngsk", x, q_weight)
    k, v = (np.einsum("bte,nke->bntk", x, weight) for weight in (k_weight, v_weight))
    sinks = None if layer.sinks is None else np.asarray(layer.sinks.array, np.float64)
    gradient = np.einsum("bse,engv->bngsv", weights, o_weight)
    dense = dense_attention(q, k, v, allowed, gradient, None, sinks)
    out = np.einsum("bngsv,engv->bse", dense.out, o_weight)
    q_gradient, _, v_gradient, sink_gradient = dense.gradients
    gradients = np.einsum("bngsk,bse->ngke", q_gradient, x), np.einsum("bntv,bte->nve", v_gradient, x), sink_gradient
    return out, gradients[: 2 if layer.sinks is None else 3]


def allowed_pairs(config, documents):
    """bool[query, key] of a causal mask, from the definition of windows and chunks."""
    lengths = documents or (LENGTH,)
    document = np.repeat(np.arange(len(lengths)), lengths)
    i = np.concatenate([np.arange(n) for n in lengths])
    allowed = (document[:, None] == document) & (i[:, None] >= i)
    if config.window:
        allowed &= i[:, None] - i < config.window
    if config.chunk:
        allowed &= i[:, None] // config.chunk == i // config.chunk
    return allowed


@pytest.mark.parametrize(
    ("part", "method", "kernel", "documents"),
    [
        *((part, None, Kernel(AttentionBackend.VANILLA), None) for part in PARTS),
        *(("all", None, Kernel(AttentionBackend.JAX_FLASH, 16), documents) for documents in (None, DOCUMENTS)),
        ("wider values", None, Kernel(AttentionBackend.JAX_FLASH, 16), None),
        *(("all", method, Kernel(), None) for method in METHODS[1:]),
        ("all", METHODS[2], Kernel(), DOCUMENTS),
        ("window and chunk", METHODS[3], Kernel(), DOCUMENTS),
    ],
    ids=str,
)
def test_equals_a_dense_softmax(part, method, kernel, documents):
    config, rng = PARTS[part], np.random.default_rng(0)
    Embed, Pos = Axis("embed", 16), Axis("position", LENGTH)
    layer = config.init(Embed, jax.random.PRNGKey(0))
    layer = jax.tree.map(lambda array: array * 20, layer)  # scores and sinks of about 1, so that they matter
    x, weights = rng.normal(size=(2, 2, LENGTH, 16))
    out, gradients = expected(layer, x, allowed_pairs(config, documents), weights)
    ring, ulysses, kind = (method.ring, method.ulysses, method.layout) if method else (1, 1, "contiguous")
    order = SequenceLayout(LENGTH, ring, ulysses, kind).positions()
    in_text = np.concatenate([np.arange(n) for n in documents or (LENGTH,)])[order]
    mask, lengths = AttentionMask.causal(), documents or (LENGTH,)
    if documents:
        ids = np.repeat(np.arange(len(lengths)), lengths)[order]
        mask = mask.with_segment_ids(hax.named(jnp.asarray(ids), Pos))
    model = SimpleNamespace(template=None, is_decoder=method is not None)
    plan = SimpleNamespace(attention=method or AttentionPlan(), workload=SimpleNamespace(position=LENGTH))

    def loss(layer, x, weights):
        positions = Positions.of(hax.named(jnp.asarray(in_text, jnp.int32), Pos))
        with planned_attention(model, plan):
            attended = layer(x, mask, positions, kernel).rearrange(("batch", Pos, Embed))
        return hax.sum(attended * weights).scalar(), attended.array

    arrays = [hax.named(jnp.asarray(each[:, order], jnp.float32), ("batch", Pos, Embed)) for each in (x, weights)]
    mesh = Mesh(np.array(jax.devices()[: DEVICES if method else 1]), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "data"} if method else {}):
        (_, actual), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(layer, *arrays)
    assert np.abs(np.asarray(actual)[:, np.argsort(order)] - out).max() <= 1e-5 * np.abs(out).max()
    found = [found.q_proj.weight, found.v_proj.weight, found.sinks]
    for gradient, wanted in zip(found, gradients, strict=False):
        assert np.abs(gradient.array - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_sinks_are_not_capped(raises_message):
    with raises_message(ConfigError):
        dataclasses.replace(PLAIN, has_sinks=True, soft_cap=50.0)
