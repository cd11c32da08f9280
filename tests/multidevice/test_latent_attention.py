"""Latent attention and its gradients, by Levanter's function and by strategies of a plan, against numpy in float64."""

from types import SimpleNamespace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionMask

from shardplan.decoder.parts.attention.frequencies import unscaled
from shardplan.decoder.parts.attention.grouped_attention import Kernel
from shardplan.decoder.parts.attention.latent_attention import LatentAttention
from shardplan.decoder.parts.attention.rotary import Positions, Rotary
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.execution.planned_attention import planned_attention
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.positions.sequence_layout import SequenceLayout

LENGTH, DEVICES, STEP = 24, 4, 1e-4
NORM = NormConfig(NormKind.RMS, 1e-6)
CONFIG = LatentAttention(
    heads=4, query_rank=10, kv_rank=7, unrotated_size=6, value_size=5, rotary=Rotary(unscaled(100.0, 4)), norm=NORM,
    scale=0.5,
)  # fmt: skip
PROJECTIONS = ("q_a_proj", "q_proj", "kv_a_proj", "k_rotated_proj", "k_proj", "v_proj", "o_proj")


def rotate(x, frequencies):
    """Multiply the complex numbers that the halves of the last axis are by exp(1j * position * frequency)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(LENGTH)[:, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], -1)


def attend_in_float64(weights, x):
    """The output [batch, position, embed] of attention with these weights, from its definition in the paper."""

    def normed(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + NORM.epsilon)

    frequencies, rotated = np.float64(CONFIG.rotary.frequencies.short), CONFIG.rotated_size
    queries = np.einsum("bsr,hkr->bhsk", normed(x @ weights["q_a_proj"].T), weights["q_proj"][:, 0])
    queries = np.concatenate([rotate(queries[..., :rotated], frequencies), queries[..., rotated:]], -1)
    latent = normed(x @ weights["kv_a_proj"].T)
    shared = rotate(x @ weights["k_rotated_proj"].T, frequencies)
    keys, values = (np.einsum("bsr,hkr->bhsk", latent, weights[name]) for name in ("k_proj", "v_proj"))
    scores = np.einsum("bhsk,btk->bhst", queries[..., :rotated], shared)
    scores = CONFIG.scale * (scores + np.einsum("bhsk,bhtk->bhst", queries[..., rotated:], keys))
    scores = np.where(np.tri(LENGTH) > 0, scores, -np.inf)
    mixed = np.exp(scores - scores.max(-1, keepdims=True))
    mixed /= mixed.sum(-1, keepdims=True)
    return np.einsum("bhst,bhtv,ehv->bse", mixed, values, weights["o_proj"])


@pytest.mark.parametrize(
    "method",
    [None, AttentionPlan("ring", 1, 4, "zigzag"), pytest.param(AttentionPlan("ulysses", 4), marks=pytest.mark.whole)],
    ids=["levanter", "ring", "ulysses"],
)
def test_equals_its_definition(method):
    rng, Embed, Pos = np.random.default_rng(0), Axis("embed", 16), Axis("position", LENGTH)
    layer = jax.tree.map(lambda array: array * 20, CONFIG.init(Embed, jax.random.PRNGKey(0)))
    layer = jax.tree.map(lambda array: array / 20 if array.ndim == 1 else array, layer)  # weights of norms stay 1
    x, factors = rng.normal(size=(2, 2, LENGTH, 16))
    weights = {name: np.asarray(getattr(layer, name).weight.array, np.float64) for name in PROJECTIONS}
    ring, ulysses, kind = (method.ring, method.ulysses, method.layout) if method else (1, 1, "contiguous")
    order = SequenceLayout(LENGTH, ring, ulysses, kind).positions()
    model = SimpleNamespace(template=None, is_decoder=method is not None)
    plan = SimpleNamespace(attention=method or AttentionPlan(), workload=SimpleNamespace(position=LENGTH))

    def loss(layer, x, factors):
        positions = Positions.of(hax.named(jnp.asarray(order, jnp.int32), Pos))
        with planned_attention(model, plan):
            attended = layer(x, AttentionMask.causal(), positions, Kernel()).rearrange(("batch", Pos, Embed))
        return hax.sum(attended * factors).scalar(), attended.array

    arrays = [hax.named(jnp.asarray(each[:, order], jnp.float32), ("batch", Pos, Embed)) for each in (x, factors)]
    mesh = Mesh(np.array(jax.devices()[: DEVICES if method else 1]), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "data"} if method else {}):
        (_, actual), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(layer, *arrays)
    out = attend_in_float64(weights, x)
    assert np.abs(np.asarray(actual)[:, np.argsort(order)] - out).max() <= 1e-5 * np.abs(out).max()
    for name in PROJECTIONS:
        direction = rng.normal(size=weights[name].shape)
        losses = []
        for step in (-STEP, STEP):
            changed = {**weights, name: weights[name] + step * direction}
            losses.append((attend_in_float64(changed, x) * factors).sum())
        expected = (losses[1] - losses[0]) / (2 * STEP)
        gradient = np.asarray(getattr(gradients, name).weight.array, np.float64)
        # relative to what a direction of this length could change at most
        assert abs((gradient * direction).sum() - expected) <= 1e-5 * np.linalg.norm(gradient) * np.linalg.norm(
            direction
        )
