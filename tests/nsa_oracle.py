"""A layer of Native Sparse Attention (https://arxiv.org/abs/2502.11089) in plain loops of NumPy, in float64.

Indices count from 0. Axes: b batch, t query position, g head of keys and values (group), r query head of a group, c
compressed block, j selection block, n selected block, k and v channels of keys and values.

A query at t sees
  compressed  block c (tokens c * stride .. c * stride + block - 1) if its last token <= t; output 0 if there is none
  selected    tokens <= t of its selected blocks; blocks 0 .. initial - 1 and the last `local` up to its own are forced
  window      tokens t - window + 1 .. t
The importance of block j is the sum over r and c of p[c] * (tokens that c and j share) / stride. Ties go to the lower
block. min(selected, t // selection_block + 1) blocks are selected. Gates are sigmoids, not normalised.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Arrays = dict[str, Any]
BRANCHES = ("cmp", "slc", "win")


@dataclass(frozen=True)
class Nsa:
    """The sizes of a layer."""

    embed: int
    groups: int
    heads_per_group: int
    key_size: int
    value_size: int
    block: int
    stride: int
    selection_block: int
    selected: int
    window: int
    initial: int = 1
    local: int = 2
    compression: str = "mlp"
    hidden: int | None = None
    compressed_rope: str = "block_start"
    theta: float | None = 10000.0

    def compressed_blocks(self, positions: int) -> int:
        return max(0, (positions - self.block) // self.stride + 1)

    def selection_blocks(self, positions: int) -> int:
        return -(-positions // self.selection_block)


def make_parameters(nsa: Nsa, seed: int) -> Arrays:
    """Random parameters, of a size that gives values of size 1."""
    rng = np.random.default_rng(seed)
    e, g, r, k, v, block = nsa.embed, nsa.groups, nsa.heads_per_group, nsa.key_size, nsa.value_size, nsa.block

    def normal(*shape: int, scale: float) -> np.ndarray:
        return rng.normal(size=shape) * scale

    parameters: Arrays = {"q": normal(e, g, r, k, scale=e**-0.5), "o": normal(g, r, v, e, scale=(g * r * v) ** -0.5)}
    for branch in BRANCHES:
        parameters[f"k_{branch}"] = normal(e, g, k, scale=e**-0.5)
        parameters[f"v_{branch}"] = normal(e, g, v, scale=e**-0.5)
    parameters["gate_w"] = normal(e, g, r, 3, scale=e**-0.5)
    parameters["gate_b"] = normal(g, r, 3, scale=0.5)
    for name, size in (("k", k), ("v", v)):
        parameters[f"phi_{name}_pe"] = normal(g, block, size, scale=0.3)
        if nsa.compression == "linear":
            parameters[f"phi_{name}_w"] = normal(g, block, size, size, scale=(block * size) ** -0.5)
        if nsa.compression == "mlp":
            hidden = nsa.hidden or 2 * size
            parameters[f"phi_{name}_w1"] = normal(g, block, size, hidden, scale=(block * size) ** -0.5)
            parameters[f"phi_{name}_b1"] = normal(g, hidden, scale=0.1)
            parameters[f"phi_{name}_w2"] = normal(g, hidden, size, scale=hidden**-0.5)
            parameters[f"phi_{name}_b2"] = normal(g, size, scale=0.1)
    return parameters


def rotate(x: Any, positions: np.ndarray, theta: float | None, xp: Any = np) -> Any:
    """Rotate [b, s, ..., k] by `positions` [s]; a channel of the first half is paired with one of the second."""
    if theta is None:
        return x
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    angle = angle.reshape((1, len(positions)) + (1,) * (x.ndim - 3) + (half,))
    a, b = x[..., :half], x[..., half:]
    return xp.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def compress(nsa: Nsa, x: Any, p: Arrays, name: str, xp: Any = np) -> Any:
    """[b, s, g, size] -> [b, c, g, size]."""
    count = nsa.compressed_blocks(x.shape[1])
    tokens = np.arange(count)[:, None] * nsa.stride + np.arange(nsa.block)[None, :]
    blocks = x[:, tokens] + xp.swapaxes(p[f"phi_{name}_pe"], 0, 1)  # [b, c, l, g, size]
    if nsa.compression == "mean":
        return blocks.mean(axis=2)
    if nsa.compression == "linear":
        return xp.einsum("bclgi,glio->bcgo", blocks, p[f"phi_{name}_w"])
    hidden = xp.einsum("bclgi,glih->bcgh", blocks, p[f"phi_{name}_w1"]) + p[f"phi_{name}_b1"]
    return xp.einsum("bcgh,gho->bcgo", xp.maximum(hidden, 0.0), p[f"phi_{name}_w2"]) + p[f"phi_{name}_b2"]


def project(nsa: Nsa, p: Arrays, x: Any, xp: Any = np) -> Arrays:
    """Queries, keys, values and gates of `x` [b, s, embed]."""
    positions = np.arange(x.shape[1])
    y: Arrays = {"q": xp.einsum("bse,egrk->bsgrk", x, p["q"])}
    for branch in BRANCHES:
        y[f"k_{branch}"] = xp.einsum("bse,egk->bsgk", x, p[f"k_{branch}"])
        y[f"v_{branch}"] = xp.einsum("bse,egv->bsgv", x, p[f"v_{branch}"])
    y["c_k"], y["c_v"] = compress(nsa, y["k_cmp"], p, "k", xp), compress(nsa, y["v_cmp"], p, "v", xp)
    y["q_cmp"] = y["q"]
    y["q"] = rotate(y["q"], positions, nsa.theta, xp)
    if nsa.compressed_rope == "block_start":
        y["q_cmp"] = y["q"]
        y["c_k"] = rotate(y["c_k"], np.arange(y["c_k"].shape[1]) * nsa.stride, nsa.theta, xp)
    for branch in ("slc", "win"):
        y[f"k_{branch}"] = rotate(y[f"k_{branch}"], positions, nsa.theta, xp)
    y["gate"] = 1 / (1 + xp.exp(-(xp.einsum("bse,egri->bsgri", x, p["gate_w"]) + p["gate_b"])))
    return y


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def shared_tokens(nsa: Nsa, positions: int) -> np.ndarray:
    """[c, j]: tokens that compressed block c and selection block j share, in units of the stride."""
    c, j = nsa.compressed_blocks(positions), nsa.selection_blocks(positions)
    starts, firsts = np.arange(c)[:, None] * nsa.stride, np.arange(j)[None, :] * nsa.selection_block
    shared = np.minimum(starts + nsa.block, firsts + nsa.selection_block) - np.maximum(starts, firsts)
    return np.maximum(shared, 0) / nsa.stride


def forced_blocks(nsa: Nsa, t: int) -> set[int]:
    """The blocks that query `t` selects whatever their importance is."""
    own = t // nsa.selection_block
    return set(range(min(nsa.initial, own + 1))) | set(range(max(0, own - nsa.local + 1), own + 1))


def ranked_choices(nsa: Nsa, importance: np.ndarray, t: int) -> list[int]:
    """The other blocks up to query `t`, by importance [j] of its group."""
    forced = forced_blocks(nsa, t)
    others = [j for j in range(t // nsa.selection_block + 1) if j not in forced]
    return sorted(others, key=lambda j: (-importance[j], j))


def select(nsa: Nsa, importance: np.ndarray, t: int) -> list[int]:
    """The selected blocks of query `t`, ascending."""
    forced = forced_blocks(nsa, t)
    return sorted(forced | set(ranked_choices(nsa, importance, t)[: nsa.selected - len(forced)]))


def attend_loops(nsa: Nsa, y: Arrays) -> Arrays:
    """The three branches by their definition, one query at a time.

    Returns cmp, slc, win [b, t, g, r, v]; importance [b, t, g, j]; blocks [b, t, g, n], ascending, -1 where unused; and
    free_mass [b, t, g], attention weights of the selected branch outside forced blocks, summed over r.
    """
    batch, positions, groups, heads, size = y["q"].shape
    scale = size**-0.5
    results: Arrays = {name: np.zeros((batch, positions, groups, heads, y["v_slc"].shape[-1])) for name in BRANCHES}
    shared = shared_tokens(nsa, positions)
    results["importance"] = np.zeros((batch, positions, groups, nsa.selection_blocks(positions)))
    results["blocks"] = np.full((batch, positions, groups, nsa.selected), -1)
    results["free_mass"] = np.zeros((batch, positions, groups))
    for b, t, g in np.ndindex(batch, positions, groups):
        visible = max(0, (t + 1 - nsa.block) // nsa.stride + 1)
        for r in range(heads if visible else 0):
            p = softmax(y["c_k"][b, :visible, g] @ y["q_cmp"][b, t, g, r] * scale)
            results["cmp"][b, t, g, r] = p @ y["c_v"][b, :visible, g]
            results["importance"][b, t, g] += p @ shared[:visible]
        blocks = select(nsa, results["importance"][b, t, g], t)
        results["blocks"][b, t, g, : len(blocks)] = blocks
        tokens = [token for token in range(t + 1) if token // nsa.selection_block in blocks]
        recent = list(range(max(0, t - nsa.window + 1), t + 1))
        is_free = [token // nsa.selection_block not in forced_blocks(nsa, t) for token in tokens]
        for r in range(heads):
            for name, keys in (("slc", tokens), ("win", recent)):
                p = softmax(y[f"k_{name}"][b, keys, g] @ y["q"][b, t, g, r] * scale)
                results[name][b, t, g, r] = p @ y[f"v_{name}"][b, keys, g]
                if name == "slc":
                    results["free_mass"][b, t, g] += p[is_free].sum()
    return results


def combine(p: Arrays, y: Arrays, branches: Arrays, xp: Any = np) -> Any:
    """Multiply the branches by their gates, add them and project: [b, t, embed]."""
    mixed = sum(y["gate"][..., i : i + 1] * branches[name] for i, name in enumerate(BRANCHES))
    return xp.einsum("btgrv,grve->bte", mixed, p["o"])


def keys_per_row(nsa: Nsa, blocks: np.ndarray) -> np.ndarray:
    """[b, t, g]: number of keys that a query attends to in the selected branch."""
    t = np.arange(blocks.shape[1])[None, :, None, None]
    keys = np.clip(t + 1 - blocks * nsa.selection_block, 0, nsa.selection_block)
    return np.where(blocks >= 0, keys, 0).sum(axis=-1)


def layer_for_blocks(nsa: Nsa, p: Arrays, x: Any, blocks: np.ndarray, xp: Any = np) -> Any:
    """The output [b, t, embed] for given blocks, by dense masks; with jax.numpy as `xp`, for gradients."""
    y = project(nsa, p, x, xp)
    positions = x.shape[1]
    t = np.arange(positions)
    member = (blocks[..., None] == np.arange(nsa.selection_blocks(positions))).any(axis=-2)  # [b, t, g, j]
    is_before = (t[None, :] <= t[:, None])[None, :, None]
    selected = np.repeat(member, nsa.selection_block, axis=-1)[..., :positions] & is_before
    recent = is_before & (t[None, :] > t[:, None] - nsa.window)[None, :, None]
    last = np.arange(y["c_k"].shape[1]) * nsa.stride + nsa.block - 1
    attended = {
        "cmp": (y["q_cmp"], y["c_k"], y["c_v"], (last[None, :] <= t[:, None])[None, :, None]),
        "slc": (y["q"], y["k_slc"], y["v_slc"], selected),
        "win": (y["q"], y["k_win"], y["v_win"], recent),
    }
    branches = {}
    for name, (queries, keys, values, mask) in attended.items():
        scores = xp.einsum("btgrk,bsgk->btgrs", queries, keys) * nsa.key_size**-0.5
        mask = mask[:, :, :, None]
        top = xp.where(mask, scores, -1e30).max(axis=-1, keepdims=True) if keys.shape[1] else 0.0
        weights = xp.where(mask, xp.exp(xp.where(mask, scores - top, 0.0)), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        branches[name] = xp.einsum("btgrs,bsgv->btgrv", weights / xp.where(total == 0, 1.0, total), values)
    return combine(p, y, branches, xp)


def gradients(nsa: Nsa, p: Arrays, x: np.ndarray, blocks: np.ndarray, cotangent: np.ndarray) -> Arrays:
    """d(sum(output * cotangent)) by each parameter and by `x`, in float64, with the selection constant."""

    def loss(values: Arrays) -> Any:
        return (layer_for_blocks(nsa, values, values["x"], blocks, jax.numpy) * cotangent).sum()

    with jax.enable_x64(True):
        return {name: np.asarray(value) for name, value in jax.jit(jax.grad(loss))({**p, "x": x}).items()}


def equation_9(nsa: Nsa, p: np.ndarray, j: int) -> float:
    """The importance of block j, counted from 1, as the paper writes it; `p` [c] is one head's probabilities."""
    per_selection, per_block = nsa.selection_block // nsa.stride, nsa.block // nsa.stride
    total = 0.0
    for m, n in np.ndindex(per_selection, per_block):
        i = per_selection * j - m - n
        total += p[i - 1] if 1 <= i <= len(p) else 0.0
    return total
