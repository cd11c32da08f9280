"""Differentiable sums over a number of rounds that only the device knows; the first round is outside of the loop.

A loop whose number of rounds depends on data has no gradient in JAX. Here the gradient of a sum is the sum of the
gradients of its rounds, each of which is computed anew from the operands: nothing of a round stays in memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from shardplan.experts.method import OVERFLOW_SCOPE

Round = Callable[[int | Array, Any, Any], Any]
"""Computes a round from its index, integers, and operands with gradients; index 0 is known while tracing."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rounds(compute: Round, count: Array, integers: Any, operands: Any) -> Any:
    """Return the sum of `compute(i, integers, operands)` over i = 0 .. count - 1, for `count` >= 1.

    >>> sum_rounds(lambda index, integers, x: x * (index + 1), jnp.int32(3), (), jnp.float32(1.0)).item()
    6.0

    Args:
        compute: function whose results have the same shapes and dtypes in every round.
        count: int32[], number of rounds; the same on all devices if rounds have collectives.
        integers: arrays without gradients.
        operands: arrays with gradients.
    """
    return _sum(count, lambda index: compute(index, integers, operands))


def _sum(count: Array, compute: Callable[[int | Array], Any]) -> Any:
    def add_round(state: tuple[Array, Any]) -> tuple[Array, Any]:
        index, total = state
        return index + 1, jax.tree.map(jnp.add, total, compute(index))

    first = compute(0)
    with jax.named_scope(OVERFLOW_SCOPE):
        return jax.lax.while_loop(lambda state: state[0] < count, add_round, (jnp.int32(1), first))[1]


def _forward(compute: Round, count: Array, integers: Any, operands: Any) -> tuple[Any, Any]:
    return sum_rounds(compute, count, integers, operands), (count, integers, operands)


def _backward(compute: Round, residuals: Any, gradient: Any) -> tuple[Any, Any, Any]:
    count, integers, operands = residuals

    def pull_back(index: int | Array) -> Any:
        return jax.vjp(lambda operands: compute(index, integers, operands), operands)[1](gradient)[0]

    return None, None, _sum(count, pull_back)


sum_rounds.defvjp(_forward, _backward)
