"""Kernels of Native Sparse Attention in JAX's interpreter, against dense masks in NumPy and float64."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import nsa_oracle as oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from nsa_oracle import Nsa

from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels import attention_gradients, launch
from shardplan.decoder.parts.attention.sparse.kernels.block_tables import make_block_tables
from shardplan.decoder.parts.attention.sparse.kernels.compressed_kernel import attend_to_compressed_by_kernel
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.kernels.selected_kernel import attend_by_kernel

BASE = Nsa(24, 2, 3, 8, 6, block=8, stride=4, selection_block=16, selected=4, window=10)


@dataclass(frozen=True)
class Inputs:
    """Random arrays of a branch, in float64; queries are at `positions`, keys at all positions."""

    positions: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    gradients: np.ndarray

    @classmethod
    def make(cls, nsa, positions, count, batch=1):
        rng = np.random.default_rng(0)
        rows, of_keys = (batch, len(positions), nsa.groups, nsa.heads_per_group), (batch, count, nsa.groups)
        sizes = (*rows, nsa.key_size), (*of_keys, nsa.key_size), (*of_keys, nsa.value_size), (*rows, nsa.value_size)
        return cls(np.asarray(positions), *(rng.normal(size=size) for size in sizes))

    def float32(self):
        return (jnp.asarray(x, jnp.float32) for x in (self.queries, self.keys, self.values, self.gradients))


def select_blocks(nsa, inputs):
    """Blocks that random importance selects, int32[b, t, g, n]."""
    rng, (batch, count, groups) = np.random.default_rng(1), inputs.queries.shape[:3]
    blocks = np.full((batch, count, groups, nsa.selected), -1, np.int32)
    for b, t, g in np.ndindex(batch, count, groups):
        importance = rng.random(nsa.selection_blocks(inputs.keys.shape[1]))
        chosen = oracle.select(nsa, importance, inputs.positions[t])
        blocks[b, t, g, : len(chosen)] = chosen
    return blocks


def selected_tokens(nsa, inputs, blocks):
    """bool[b, t, g, s]: the tokens of selected blocks that are not after the query."""
    tokens = np.arange(inputs.keys.shape[1])
    is_selected = (blocks[..., None, :] == (tokens // nsa.selection_block)[:, None]).any(axis=-1)
    return is_selected & (tokens <= inputs.positions[:, None])[:, None]


def dense_attention(queries, keys, values, is_visible, xp=np):
    """The output [b, t, g, r, d] and the weights [b, t, g, r, s] by a dense mask; 0 for queries that see nothing."""
    scores = xp.einsum("btgrd,bsgd->btgrs", queries, keys) * queries.shape[-1] ** -0.5
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True)) * is_visible[:, :, :, None]
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / xp.where(total == 0, 1, total)
    return xp.einsum("btgrs,bsgd->btgrd", weights, values), weights


def dense_gradients(inputs, is_visible):
    """Gradients of queries, keys and values in float64."""

    def loss(*arrays):
        return (dense_attention(*arrays, is_visible, jnp)[0] * inputs.gradients).sum()

    with jax.enable_x64(True):
        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(inputs.queries, inputs.keys, inputs.values)
        return [np.asarray(gradient) for gradient in gradients]


def check_gradients(found, expected):
    for name, gradient, by_oracle in zip(("queries", "keys", "values"), found, expected, strict=True):
        assert np.abs(np.asarray(gradient) - by_oracle).max() <= 1e-4 * np.abs(by_oracle).max(), name


ZIGZAG = [*range(32, 64), *range(96, 128)]


@pytest.mark.parametrize(
    ("changes", "positions", "count", "batch"),
    [
        pytest.param({}, range(75), 75, 2, id="last block shorter"),
        pytest.param(
            {"heads_per_group": 1, "groups": 1, "selection_block": 32, "selected": 9, "value_size": 8, "local": 1},
            range(70), 70, 1, id="32 queries in a tile",
        ),
        pytest.param({"selected": 5, "initial": 0}, ZIGZAG, 128, 1, id="two parts of a sequence"),
        pytest.param({"heads_per_group": 16, "selection_block": 64, "selected": 16, "key_size": 16}, range(1500), 1500,
                     1, id="sizes of the paper", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_selected_kernel(changes, positions, count, batch):
    """Output and gradients, and the weights outside forced blocks."""
    nsa = replace(BASE, **changes)
    config, inputs = NativeSparseConfig(**vars(nsa)), Inputs.make(nsa, positions, count, batch)
    blocks = select_blocks(nsa, inputs)
    queries, keys, values, gradients = inputs.float32()

    def loss(queries, keys, values):
        output, free = attend_by_kernel(config.selection, True, inputs.positions, blocks, queries, keys, values)
        return (output * gradients).sum(), (output, free)

    found, (output, free) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(queries, keys, values)
    is_visible = selected_tokens(nsa, inputs, blocks)
    expected, weights = dense_attention(inputs.queries, inputs.keys, inputs.values, is_visible)
    assert np.abs(np.asarray(output) - expected).max() < 1e-5
    check_gradients(found, dense_gradients(inputs, is_visible))
    token_blocks, own = np.arange(count) // nsa.selection_block, inputs.positions[:, None] // nsa.selection_block
    is_free = (token_blocks >= nsa.initial) & (token_blocks <= own - nsa.local)
    expected_free = (weights * is_free[None, :, None, None]).sum(axis=(-2, -1))
    assert np.abs(np.asarray(free) - expected_free).max() < 1e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_a_long_sequence(monkeypatch, groups):
    """Of which VMEM has the keys and values of 3 blocks of 16 tokens: the 9 blocks are computed in 3 ranges."""
    nsa = replace(BASE, groups=groups, selected=6)
    block_bytes = nsa.selection_block * (nsa.key_size + nsa.value_size) * (4 + 4)
    monkeypatch.setattr(
        attention_gradients, "vmem_bytes", lambda: 3.5 * block_bytes / attention_gradients.RESIDENT_SHARE
    )
    config, inputs = NativeSparseConfig(**vars(nsa)), Inputs.make(nsa, range(140), 140)
    blocks = select_blocks(nsa, inputs)
    queries, keys, values, gradients = inputs.float32()

    def attend(*arrays):
        return attend_by_kernel(config.selection, False, inputs.positions, blocks, *arrays)[0]

    _, backward = jax.vjp(jax.jit(attend), queries, keys, values)
    assert "length=3" in str(jax.make_jaxpr(backward)(gradients))
    check_gradients(backward(gradients), dense_gradients(inputs, selected_tokens(nsa, inputs, blocks)))


@pytest.mark.parametrize(
    ("changes", "positions", "count"),
    [
        pytest.param({}, range(75), 75, id="one chunk"),
        pytest.param(
            {"groups": 1, "block": 8, "selection_block": 8}, [*range(16), *range(2032, 2064)], 2500,
            id="three chunks, two parts of a sequence",
        ),
        pytest.param({"groups": 1}, range(7), 7, id="no compressed block"),
        pytest.param({"heads_per_group": 16, "block": 32, "stride": 16, "selection_block": 64}, range(1500), 1500,
                     id="sizes of the paper", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_compressed_kernel(changes, positions, count):
    """Output, importance of blocks, and gradients."""
    nsa = replace(BASE, **changes)
    config = NativeSparseConfig(**vars(nsa))
    inputs = Inputs.make(nsa, positions, nsa.compressed_blocks(count), 2)
    queries, keys, values, gradients = inputs.float32()
    selection_blocks = nsa.selection_blocks(count)

    def loss(queries, keys, values):
        results = attend_to_compressed_by_kernel(config, selection_blocks, inputs.positions, queries, keys, values)
        return (results[0] * gradients).sum() + results[1].sum(), results

    found, (output, importance) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(queries, keys, values)
    last_tokens = np.arange(inputs.keys.shape[1]) * nsa.stride + nsa.block - 1
    is_visible = (last_tokens <= inputs.positions[:, None])[None, :, None]
    assert importance.shape == (2, len(positions), nsa.groups, selection_blocks)
    if not is_visible.size:
        assert not output.any() and not importance.any() and not found[0].any()
        return
    expected, weights = dense_attention(inputs.queries, inputs.keys, inputs.values, is_visible)
    assert np.abs(np.asarray(output) - expected).max() < 1e-5
    expected_importance = weights.sum(axis=3) @ oracle.shared_tokens(nsa, count)
    assert np.abs(np.asarray(importance) - expected_importance).max() < 1e-5
    check_gradients(found, dense_gradients(inputs, is_visible))


def test_queries_without_blocks():
    """Their output and gradients are 0, and they give none to block 0, which stands in for unused entries."""
    config, inputs = NativeSparseConfig(**vars(BASE)), Inputs.make(BASE, range(16, 24), 40)
    blocks = np.full((1, 8, 2, 4), -1, np.int32)
    blocks[:, 4:, :, 0] = 1
    queries, keys, values, gradients = inputs.float32()

    def attend(*arrays):
        return attend_by_kernel(config.selection, False, inputs.positions, blocks, *arrays)[0]

    with jax.debug_nans(True):
        output, backward = jax.vjp(jax.jit(attend), queries, keys, values)
        of_queries, *of_keys = backward(gradients)
    for x in (output, of_queries):
        assert not x[:, :4].any() and np.asarray(x[:, 4:]).all()
    for gradient in of_keys:
        assert np.asarray(gradient != 0).any(axis=(0, 2, 3)).tolist() == [16 <= token <= 23 for token in range(40)]


@pytest.mark.whole
def test_copies_are_awaited(monkeypatch, capfd):
    """In the interpreter that copies as late as possible, and that reports reads before a copy's end."""
    monkeypatch.setattr(launch, "INTERPRETER", pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True))
    nsa = replace(BASE, groups=1)
    config, inputs = NativeSparseConfig(**vars(nsa)), Inputs.make(nsa, range(200), 200)
    blocks = select_blocks(nsa, inputs)
    queries, keys, values, gradients = inputs.float32()

    def attend(*arrays):
        return attend_by_kernel(config.selection, False, inputs.positions, blocks, *arrays)[0]

    output, backward = jax.vjp(jax.jit(attend), queries, keys, values)
    found = backward(gradients)
    is_visible = selected_tokens(nsa, inputs, blocks)
    expected, _ = dense_attention(inputs.queries, inputs.keys, inputs.values, is_visible)
    assert np.abs(np.asarray(output) - expected).max() < 1e-5
    check_gradients(found, dense_gradients(inputs, is_visible))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("selected", [1, 5, 16])
def test_tables(selected):
    """Against sets of Python."""
    nsa = replace(BASE, selected=selected, initial=0, local=1, heads_per_group=8)
    inputs = Inputs.make(nsa, range(150), 150, batch=2)
    blocks, count = select_blocks(nsa, inputs), nsa.selection_blocks(150)
    tiles = QueryTiles.of(nsa.selection_block, 150, nsa.heads_per_group)
    assert (tiles.queries, tiles.per_sequence) == (16, 10)
    tables = jax.jit(lambda blocks: make_block_tables(tiles, blocks, count, 8))(blocks)
    assert tables.blocks.shape == (2 * 2 * 10, 1, 16 if selected * 16 > 8 else 8)
    for b, g in np.ndindex(2, 2):
        for tile in range(10):
            of_tile = blocks[b, tile * 16 : (tile + 1) * 16, g]
            union = sorted({*of_tile.flatten().tolist()} - {-1})
            members = [sum(1 << i for i, row in enumerate(of_tile) if j in row) for j in union]
            row = (b * 2 + g) * 10 + tile
            for found, expected in ((tables.blocks, union), (tables.members, members)):
                assert found[row, 0].tolist() == expected + [0] * (found.shape[-1] - len(expected))
