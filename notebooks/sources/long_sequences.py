# %% [markdown]
# # Long sequences
#
# Where a sequence is too long for one device, its positions are sharded, and every query needs the keys of other
# devices. Here the strategies of `shardplan.attention` run on eight virtual devices, and are compared with dense
# attention in float64.

# %%
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

# %% [markdown]
# ## Queries, keys and values
#
# Eight query heads share two key heads. The mesh axis `model` shards `position`.

# %%
import haliax as hax
import jax
from jax.sharding import AxisType

Heads = hax.make_axes(kv_head=2, q_heads_per_group=4)
Pos, HeadSize = hax.make_axes(position=128, head_size=16)
KeyPos = Pos.alias("key_position")

keys = jax.random.split(jax.random.PRNGKey(0), 4)
query = hax.random.normal(keys[0], (*Heads, Pos, HeadSize))
key = hax.random.normal(keys[1], (Heads[0], KeyPos, HeadSize))
value = hax.random.normal(keys[2], (Heads[0], KeyPos, HeadSize))
cotangent = hax.random.normal(keys[3], query.axes)  # the gradient of the output

mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

# %% [markdown]
# ## The reference
#
# Dense causal attention in float64, and its gradients by JAX:

# %%
import jax.numpy as jnp
import numpy as np


def dense(q, k, v):
    scores = jnp.einsum("ngsd,ntd->ngst", q, k) / jnp.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("ngst,ntd->ngsd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v)


with jax.enable_x64(True):
    q, k, v, g = (jnp.asarray(np.asarray(x.array), jnp.float64) for x in (query, key, value, cotangent))
    output, pull_back = jax.vjp(dense, q, k, v)
    expected = [np.asarray(x) for x in (output, *pull_back(g))]
print(expected[0].dtype, expected[0].shape)

# %% [markdown]
# ## Every strategy
#
# `dot_product_attention` has the arguments of Levanter's, and reads from the axis mapping that positions are sharded.
# The strategies differ in what travels:
#
# - `all_gather`: every device gathers all keys and values,
# - `ring`: keys and values pass around, one neighbour at a time,
# - `ulysses`: an all-to-all exchanges positions for heads, and back,
# - `hybrid`: Ulysses in groups of neighbours, a ring between the groups.

# %%
from functools import partial

from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention


def attend(query, key, value, **options):
    mask = AttentionMask.causal()
    return dot_product_attention(Pos, KeyPos, HeadSize, query, key, value, mask, **options)


for strategy in ("all_gather", "ring", "ulysses", "hybrid"):
    attend_sharded = hax.named_jit(partial(attend, strategy=strategy), axis_resources={"position": "model"})
    with hax.partitioning.set_mesh(mesh):
        result = attend_sharded(query, key, value)
    np.testing.assert_allclose(result.array, expected[0], atol=2e-5)
    print(f"{strategy:10} agrees with float64")

# %% [markdown]
# Gradients have the same shardings and take the same way. Those of a ring of four pairs of devices:


# %%
@hax.named_jit(axis_resources={"position": "model"})
def gradients(query, key, value, cotangent):
    _, pull_back = jax.vjp(partial(attend, strategy="hybrid", ulysses=2), query, key, value)
    return pull_back(cotangent)


with hax.partitioning.set_mesh(mesh):
    for result, reference in zip(gradients(query, key, value, cotangent), expected[1:], strict=True):
        np.testing.assert_allclose(result.array, reference, atol=2e-5)
print("gradients of queries, keys and values agree")

# %% [markdown]
# ## Zigzag
#
# Under a causal mask the last positions attend to most keys: in the order of the sequence the last device works while
# the first waits. A zigzag gives each device an early and a late part.

# %%
from shardplan.attention import SequenceLayout

for kind in ("contiguous", "zigzag"):
    print(kind)
    layout = SequenceLayout(length=128, ring=8, kind=kind)
    for device, positions in enumerate(layout.positions_by_ring_index()):
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        held = " and ".join(f"{run[0]} to {run[-1]}" for run in runs)
        print(f"  device {device}: {held:23} {(positions + 1).sum():5} scores")

# %% [markdown]
# The result is the same if queries and keys are in that order, and `layout` says so:

# %%
layout = SequenceLayout(length=128, ring=8, kind="zigzag")
order = layout.positions()
reordered = [x.take(axis, hax.named(order, axis)) for x, axis in ((query, Pos), (key, KeyPos), (value, KeyPos))]
attend_sharded = hax.named_jit(partial(attend, strategy="ring", layout=layout), axis_resources={"position": "model"})
with hax.partitioning.set_mesh(mesh):
    result = attend_sharded(*reordered)
np.testing.assert_allclose(result.array[:, :, layout.array_indices()], expected[0], atol=2e-5)
print("a ring in zigzag order agrees too")

# %% [markdown]
# ## In a Levanter model
#
# `with_sequence_parallel` replaces the attention of a model, and `shard_sequence` puts an example in the order of a
# layout: tokens, targets and rotary positions. The losses are those that transformers computed for this small
# checkpoint.

# %%
from levanter.models.lm_model import LmExample

from shardplan import load_pretrained
from shardplan.attention import Method, next_token_losses, shard_sequence, with_sequence_parallel

checkpoint = "../tests/golden/data/llama"
golden = np.load(f"{checkpoint}/golden.npz")  # tokens, and logits by transformers
tokens = hax.named(golden["tokens"][0], "position")
layout = SequenceLayout(length=tokens.size, ring=4, ulysses=2, kind="zigzag")

with hax.partitioning.set_mesh(mesh):
    model = with_sequence_parallel(load_pretrained(checkpoint), Method("hybrid", ulysses=2, layout=layout))


@hax.named_jit(axis_resources={"position": "model"})
def mean_loss(model, tokens):
    sequence = shard_sequence(LmExample.causal(tokens), layout)
    return (next_token_losses(model, sequence).sum() / sequence.loss_mask.sum()).scalar()


with hax.partitioning.set_mesh(mesh):
    loss = mean_loss(model, tokens)

log_probabilities = np.asarray(jax.nn.log_softmax(golden["logits"][0, :-1]))
reference = -np.take_along_axis(log_probabilities, golden["tokens"][0, 1:, None], -1).mean()
print(f"sharded {loss:.4f}, transformers {reference:.4f} nats per token")

# %% [markdown]
# ## What the planner chooses
#
# A prompt of 131,072 tokens for Llama-3.1-405B on v4-256. The planner weighs the strategies by the mask, the bytes on
# the torus and the memory, together with everything else that the mesh has to do:

# %%
from shardplan import load_config, make_plan

plan = make_plan(load_config("../configs/405b-128k.yaml"))
plan

# %%
print(plan.attention)
for reason in plan.search.reasons:
    if "sequence" in reason or "attention" in reason:
        print("-", reason)
