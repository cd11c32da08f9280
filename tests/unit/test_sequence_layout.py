"""Sequence orders, and the ring distances and blocks that a mask needs, compared with all pairs of positions."""

import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import ConfigError
from shardplan.positions import sequence_layout
from shardplan.positions.pattern import PADDING, Pattern, position_runs
from shardplan.positions.sequence_layout import (
    CACHED_LAYOUTS,
    SequenceLayout,
    SequenceOrder,
    count_blocks,
    document_ids,
    ring_distances,
)

patterns = st.builds(
    Pattern, st.booleans(), st.integers(-3, 9), st.none() | st.integers(1, 12), st.integers(0, 20),
    chunk=st.none() | st.integers(1, 16),
)  # fmt: skip


@st.composite
def layouts(draw):
    length, lengths = draw(st.integers(1, 60)), draw(st.none() | st.lists(st.integers(1, 20), max_size=5))
    documents = None
    if lengths is not None:
        labels = np.repeat(np.arange(len(lengths) + 1), [*lengths, max(0, length - sum(lengths))])[:length]
        documents = tuple(int(n) for n in np.bincount(labels) if n)
    return SequenceLayout(
        length, draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.sampled_from(SequenceOrder)), documents
    )


@given(layouts())
def test_every_position_occurs_once(layout):
    positions = layout.positions()
    assert sorted(positions[positions != PADDING]) == list(range(layout.length))
    assert len(positions) == layout.padded_length < layout.length + 2 * layout.ring * layout.ulysses
    assert layout.positions_by_ring_index().shape == (layout.ring, layout.padded_length // layout.ring)


@given(layouts())
def test_runs_contain_all_positions(layout):
    for shard in layout.positions_by_ring_index():
        runs = position_runs(shard, step=layout.ring if layout.kind == "striped" else 1)
        positions = [run.start + i * run.step for run in runs for i in range(run.count)]
        assert positions == [position for position in shard if position != PADDING]
        if layout.kind in ("contiguous", "zigzag"):
            assert len(runs) <= 2


def allowed_pairs(layout, pattern):
    """bool[query, key] from the definition of the mask, independent of `Pattern`."""
    i, j = np.arange(layout.length)[:, None], np.arange(layout.length)[None]
    documents = document_ids(layout) if layout.documents else np.zeros(layout.length)
    allowed = documents[:, None] == documents[None]
    if pattern.causal:
        allowed &= (j <= i + pattern.causal_offset) | (j < pattern.prefix)
    if pattern.window is not None:
        allowed &= (j <= i) & (i - j < pattern.window)
    if pattern.chunk is not None:
        starts = np.cumsum([0, *(layout.documents or (layout.length,))])
        in_document = i[:, 0] - starts[np.searchsorted(starts, i[:, 0], "right") - 1]
        allowed &= (in_document[:, None] // pattern.chunk) == (in_document[None] // pattern.chunk)
    return allowed


@pytest.mark.slow
@given(layouts(), patterns, st.integers(1, 9), st.sampled_from([5, sequence_layout.MAX_RUN_PAIRS]))
def test_distances_and_blocks_are_those_that_any_pair_needs(layout, pattern, block, max_pairs):
    allowed = np.pad(allowed_pairs(layout, pattern), (0, 1))  # padding comes last
    shards = layout.positions_by_ring_index()
    counts = np.zeros((layout.ring, layout.ring), int)
    for r in range(layout.ring):
        for d in range(layout.ring):
            pairs = allowed[np.ix_(shards[r], shards[(r - d) % layout.ring])]
            for i in range(0, pairs.shape[0], block):
                for j in range(0, pairs.shape[1], block):
                    counts[r, d] += pairs[i : i + block, j : j + block].any()
    with mock.patch.object(sequence_layout, "MAX_RUN_PAIRS", max_pairs):
        assert (count_blocks(layout, layout, pattern, block) == counts).all()
    assert ring_distances(layout, layout, pattern) == (0, *(d for d in range(1, layout.ring) if counts[:, d].any()))


@pytest.mark.parametrize(
    ("pattern", "documents", "expected"),
    [
        (Pattern(causal=True, window=4096), None, (0, 1)),  # the window fits in one hop
        (Pattern(causal=True, chunk=8192), None, (0,)),  # each device has a chunk
        (Pattern(causal=True, chunk=8192), [12288] * 5 + [4096], (0, 1)),  # chunks begin with a document
        (Pattern(causal=True, chunk=32768), None, (0, 1, 2, 3)),
        (Pattern(causal=True), [8192] * 8, (0,)),  # aligned documents
        (Pattern(causal=True), None, tuple(range(8))),
        (Pattern(causal=True), [12288] * 5 + [4096], (0, 1)),
    ],
)
def test_ring_distances_at_64k_on_8_devices(pattern, documents, expected):
    layout = SequenceLayout(65536, 8, documents=None if documents is None else tuple(documents))
    assert ring_distances(layout, layout, pattern) == expected


def balance(layout, pattern):
    """Blocks of the slowest device, divided by the mean."""
    work = count_blocks(layout, layout, pattern, 512).sum(1)
    return work.max() / work.mean()


def test_balance_of_a_causal_mask():
    """In contiguous order the last device has nearly twice the mean."""
    ratio = {kind: balance(SequenceLayout(65536, 8, 1, kind), Pattern(causal=True)) for kind in SequenceOrder}
    assert ratio["contiguous"] > 1.8
    assert max(ratio["zigzag"], ratio["striped"], ratio["documents"]) <= 1.05


def test_balance_of_packed_documents():
    """Document lengths vary as those of web pages and source files do: most are short, and a few are very long."""
    sizes = np.random.default_rng(4).lognormal(mean=np.log(3000), sigma=1.5, size=100).astype(int)
    ends = np.minimum(np.cumsum(sizes), 65536)
    documents = tuple(int(n) for n in np.diff(ends, prepend=0) if n)
    assert sum(documents) == 65536 and len(documents) > 8
    layouts = [SequenceLayout(65536, 8, 1, kind, documents) for kind in SequenceOrder]
    ratio = {layout.kind: balance(layout, Pattern(causal=True)) for layout in layouts}
    assert min(ratio["contiguous"], ratio["zigzag"]) > 2
    assert max(ratio["striped"], ratio["documents"]) <= 1.15


def test_strings_are_converted_to_orders(raises_message):
    assert SequenceLayout(8, kind="zigzag").kind is SequenceOrder.ZIGZAG
    with raises_message(ConfigError):
        SequenceLayout(8, kind="zig")


def test_positions_of_old_packings_are_forgotten():
    """A training run packs documents in another way in every batch."""

    def layout(first):
        return SequenceLayout(1024, ring=4, kind="documents", documents=(first, 1024 - first))

    oldest = weakref.ref(layout(1).positions())
    for first in range(2, 2 + CACHED_LAYOUTS):
        layout(first).positions()
    assert oldest() is None
