"""Orders of positions, and which hops and blocks of a ring a mask needs, against every pair of positions."""

import importlib.util
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.positions import sequence_layout
from shardplan.positions.pattern import PADDING, Pattern, runs_of
from shardplan.positions.sequence_layout import KINDS, SequenceLayout, blocks, hops, labels_of

patterns = st.builds(Pattern, st.booleans(), st.integers(-3, 9), st.none() | st.integers(1, 12), st.integers(0, 20))


@st.composite
def layouts(draw):
    length, lengths = draw(st.integers(1, 60)), draw(st.none() | st.lists(st.integers(1, 20), max_size=5))
    documents = None
    if lengths is not None:
        labels = np.repeat(np.arange(len(lengths) + 1), [*lengths, max(0, length - sum(lengths))])[:length]
        documents = tuple(int(n) for n in np.bincount(labels) if n)
    return SequenceLayout(
        length, draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.sampled_from(KINDS)), documents
    )


@given(layouts())
def test_an_order_has_every_position_once(layout):
    order = layout.order()
    assert sorted(order[order != PADDING]) == list(range(layout.length))
    assert len(order) == layout.padded < layout.length + 2 * layout.ring * layout.ulysses
    assert layout.regions().shape == (layout.ring, layout.padded // layout.ring)


@given(layouts())
def test_runs_are_the_positions(layout):
    for region in layout.regions():
        runs = runs_of(region, step=layout.ring if layout.kind == "striped" else 1)
        found = [run.start + i * run.step for run in runs for i in range(run.count)]
        assert found == [position for position in region if position != PADDING]
        if layout.kind in ("contiguous", "zigzag"):
            assert len(runs) <= 2


def allowed_pairs(layout, pattern):
    """bool[query, key], as the mask is defined; the window here is that of the definition, not of the code."""
    i, j = np.arange(layout.length)[:, None], np.arange(layout.length)[None]
    labels = labels_of(layout) if layout.documents else np.zeros(layout.length)
    allowed = labels[:, None] == labels[None]
    if pattern.causal:
        allowed &= (j <= i + pattern.offset) | (j < pattern.prefix)
    if pattern.window is not None:
        allowed &= (j <= i) & (i - j < pattern.window)
    return allowed


@settings(deadline=None)
@given(layouts(), patterns, st.integers(1, 9), st.sampled_from([5, sequence_layout.MOST_PAIRS]))
def test_hops_and_blocks_are_those_that_any_pair_needs(layout, pattern, block, most):
    allowed = np.pad(allowed_pairs(layout, pattern), (0, 1))  # padding comes last
    regions = layout.regions()
    counts = np.zeros((layout.ring, layout.ring), int)
    for r in range(layout.ring):
        for d in range(layout.ring):
            pairs = allowed[np.ix_(regions[r], regions[(r - d) % layout.ring])]
            for i in range(0, pairs.shape[0], block):
                for j in range(0, pairs.shape[1], block):
                    counts[r, d] += pairs[i : i + block, j : j + block].any()
    with mock.patch.object(sequence_layout, "MOST_PAIRS", most):
        assert (blocks(layout, layout, pattern, block) == counts).all()
    assert hops(layout, layout, pattern) == (0, *(d for d in range(1, layout.ring) if counts[:, d].any()))


@pytest.mark.parametrize(
    ("pattern", "documents", "expected"),
    [
        (Pattern(causal=True, window=4096), None, (0, 1)),  # all halos in one hop
        (Pattern(causal=True), [8192] * 8, (0,)),  # aligned documents
        (Pattern(causal=True), None, tuple(range(8))),
        (Pattern(causal=True), [12288] * 5 + [4096], (0, 1)),
    ],
)
def test_hops_at_64k_on_8_devices(pattern, documents, expected):
    layout = SequenceLayout(65536, 8, documents=None if documents is None else tuple(documents))
    assert hops(layout, layout, pattern) == expected


def balance(layout, pattern):
    """Blocks of the slowest device over those of the mean one."""
    work = blocks(layout, layout, pattern, 512).sum(1)
    return work.max() / work.mean()


def test_balance_of_a_causal_mask():
    """Contiguous gives the last device nearly twice the mean."""
    found = {kind: balance(SequenceLayout(65536, 8, 1, kind), Pattern(causal=True)) for kind in KINDS}
    assert found["contiguous"] > 1.8
    assert max(found["zigzag"], found["striped"], found["documents"]) <= 1.05


def test_balance_of_packed_documents():
    """Lengths of real files, four bytes a token: Haliax's and Levanter's own modules, until 64K are full."""
    roots = [Path(importlib.util.find_spec(name).origin).parent for name in ("haliax", "levanter")]
    sizes = [path.stat().st_size // 4 for root in roots for path in sorted(root.rglob("*.py"))]
    ends = np.minimum(np.cumsum(sizes), 65536)
    documents = tuple(int(n) for n in np.diff(ends, prepend=0) if n)
    assert sum(documents) == 65536 and len(documents) > 8
    found = {kind: balance(SequenceLayout(65536, 8, 1, kind, documents), Pattern(causal=True)) for kind in KINDS}
    assert min(found["contiguous"], found["zigzag"]) > 2
    assert max(found["striped"], found["documents"]) <= 1.15
