"""Orders of positions, and which hops of a ring a mask needs, against every pair of positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.attention.layout import KINDS, Layout, hops
from shardplan.attention.pattern import PADDING, Pattern, runs_of

layouts = st.builds(Layout, st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.sampled_from(KINDS))
patterns = st.builds(Pattern, st.booleans(), st.integers(-3, 9), st.none() | st.integers(1, 12), st.integers(0, 20))


@given(layouts)
def test_an_order_has_every_position_once(layout):
    order = layout.order()
    assert sorted(order[order != PADDING]) == list(range(layout.length))
    assert len(order) == layout.padded < layout.length + 2 * layout.ring * layout.ulysses
    assert layout.regions().shape == (layout.ring, layout.padded // layout.ring)


@given(layouts)
def test_runs_are_the_positions(layout):
    for region in layout.regions():
        runs = runs_of(region)
        found = [run.start + i * run.step for run in runs for i in range(run.count)]
        assert found == [position for position in region if position != PADDING]
        if layout.kind != "striped":
            assert len(runs) <= 2


@given(layouts, patterns, st.lists(st.integers(1, 20), max_size=5))
def test_hops_are_those_that_any_pair_needs(layout, pattern, lengths):
    """As every pair of positions says it; the window here is that of the definition, not of the code."""
    labels = np.repeat(np.arange(len(lengths) + 1), [*lengths, max(0, layout.length - sum(lengths))])[: layout.length]
    documents = np.bincount(labels).tolist()
    i, j = np.arange(layout.length)[:, None], np.arange(layout.length)[None]
    allowed = labels[:, None] == labels[None]
    if pattern.causal:
        allowed &= (j <= i + pattern.offset) | (j < pattern.prefix)
    if pattern.window is not None:
        allowed &= (j <= i) & (i - j < pattern.window)
    regions = [region[region != PADDING] for region in layout.regions()]
    needed = {
        d
        for r, region in enumerate(regions)
        for d in range(layout.ring)
        if allowed[np.ix_(region, regions[(r - d) % layout.ring])].any()
    }
    assert hops(layout, layout, pattern, documents) == tuple(sorted({0, *needed}))


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
    layout = Layout(65536, 8)
    assert hops(layout, layout, pattern, documents) == expected


def test_zigzag_is_as_much_for_each():
    """Of a causal mask: contiguous gives the last device nearly twice the mean."""
    pairs = {}
    for kind in KINDS:
        regions = Layout(64 * 8, 8, 1, kind).regions()
        pairs[kind] = [int((region + 1).sum()) for region in regions]
    assert max(pairs["contiguous"]) > 1.8 * np.mean(pairs["contiguous"])
    assert max(pairs["zigzag"]) <= 1.05 * np.mean(pairs["zigzag"])
    assert max(pairs["striped"]) <= 1.05 * np.mean(pairs["striped"])
