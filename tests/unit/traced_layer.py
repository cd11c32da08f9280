"""A traced model of two matmuls per layer between an embedding and a head, with bytes that are easy to calculate."""

import dataclasses

import jax
import jax.numpy as jnp

from shardplan.program.named_arrays import TracedArray
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step

B, P, E, M, V, LAYERS = 8, 16, 32, 64, 128, 3
"""Sizes of batch, position, embed, mlp and vocab, and the number of layers."""
PARAMETERS = {
    "embed": {"vocab": V, "embed": E},
    "head": {"vocab": V, "embed": E},
    "mlp_down": {"layer": LAYERS, "embed": E, "mlp": M},
    "mlp_up": {"layer": LAYERS, "mlp": M, "embed": E},
}
MESH = {"replica": 2, "data": 4, "model": 2}
TOKENS = {"batch": ("replica", "data")}
WEIGHT = 4 * E * M
"""Bytes of one layer's weight."""


def loss(weights, tokens):
    def layer(x, weights):
        hidden = jnp.tanh(jnp.einsum("bpe,me->bpm", x, weights["mlp_up"]))
        return x + jnp.einsum("bpm,em->bpe", hidden, weights["mlp_down"]), None

    stacked = {path: weights[path] for path in ("mlp_up", "mlp_down")}
    x, _ = jax.lax.scan(layer, weights["embed"][tokens], stacked)
    return jnp.einsum("bpe,ve->bpv", x, weights["head"]).max()


def traced_step(is_training):
    """The step of `loss`, or of its gradient."""
    weights = {path: jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32) for path, axes in PARAMETERS.items()}
    tokens = jax.ShapeDtypeStruct((B, P), jnp.int32)
    jaxpr = jax.make_jaxpr(jax.grad(loss) if is_training else loss)(weights, tokens)
    arguments = [Argument.parameter(tuple(axes), path) for path, axes in PARAMETERS.items()]
    arguments.append(Argument(("batch", "position")))
    arrays = [
        TracedArray(tuple(((name, n),) for name, n in axes.items()), 4, path) for path, axes in PARAMETERS.items()
    ]
    return dataclasses.replace(
        build_step(trace_jaxpr(jaxpr, arguments)),
        parameters=tuple(arrays),
        activation_axes=("batch", "position"),
        vocab="vocab",
    )
