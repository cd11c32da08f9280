"""Sequence-parallel attention against dense attention in float64: outputs and all gradients."""

import itertools
import random

import jax.numpy as jnp
import pytest
from attention_cases import EXTRAS, HEADS, MASKS, STRATEGIES, Case, check

from shardplan.positions.sequence_order import SequenceOrder


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
