"""Blocks and scales of views of codes, against the scale of every element."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.checkpoint.mapping.code_views import Scales, find_blocks, first_of_blocks, view_of_scales
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import View, concatenate, row_major_strides, stack, tensor_view


def elements_of(view):
    """The element of the tensor at every index of a view of one tensor."""
    result = np.full(view.shape, -1)
    for piece in view.pieces:
        index = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
        result[index] = piece.offset
        for d, stride in enumerate(piece.strides):
            steps = np.arange(piece.shape[d]) * stride
            result[index] += steps.reshape([-1 if i == d else 1 for i in range(len(view.shape))])
    return result


@st.composite
def coded_views(draw):
    """A view of a matrix of codes, as rules make it, and where the scales are."""
    dims = draw(st.tuples(st.sampled_from([4, 6, 12, 24]), st.sampled_from([8, 12, 30])))
    group = draw(st.tuples(st.sampled_from([1, 2, 4, 8, 100]), st.sampled_from([1, 3, 4, 32])))
    counts = tuple(-(-n // size) for n, size in zip(dims, group, strict=True))
    view = tensor_view("t", dims)
    if draw(st.booleans()):  # heads
        heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if dims[0] % n == 0]))
        view = view.reshape((heads, dims[0] // heads, dims[1]))
    if draw(st.booleans()):
        first = draw(st.integers(0, view.shape[0] - 1))
        view = view.slice((first, *[0] * (len(view.shape) - 1)), view.shape)
    if draw(st.booleans()):  # each second one
        rest = view.shape[1:]
        if view.shape[0] % 2 == 0:
            view = view.reshape((view.shape[0] // 2, 2, *rest))
            low, high = (0, 1, *[0] * len(rest)), (view.shape[0], 2, *rest)
            view = view.slice(low, high).reshape((view.shape[0], *rest))
    view = view.transpose(draw(st.permutations(range(len(view.shape)))))
    if draw(st.booleans()):
        view = stack([view, view], 0) if draw(st.booleans()) else concatenate([view, view], 0)
    return view, Scales(dims, group, row_major_strides(counts)), counts


@pytest.mark.slow
@given(coded_views())
@settings(max_examples=300)
def test_scales_of_blocks_are_those_of_all_their_codes(case):
    view, scales, counts = case
    blocks = find_blocks(view, {"t": scales})
    row, column = np.divmod(elements_of(view), scales.shape[1])
    expected = row // scales.group[0] * counts[1] + column // scales.group[1]
    if blocks is None:
        return
    shape = tuple(n // size for n, size in zip(view.shape, blocks, strict=True))
    firsts = first_of_blocks(view, shape)
    np.testing.assert_array_equal(
        elements_of(firsts), elements_of(view)[tuple(slice(None, None, size) for size in blocks)]
    )
    found = elements_of(view_of_scales(firsts, {"t": scales}))
    for d, size in enumerate(blocks):
        found = np.repeat(found, size, axis=d)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dims", [(1536, 4104), (1001, 4104), (128 * 192, 1536)])
def test_few_pieces_of_scales(dims):
    """Where groups do not divide dimensions, a piece is a run of codes with one scale, and not a code."""
    scales = Scales(dims, (128, 128), (-(-dims[1] // 128), 1))
    view = tensor_view("t", dims) if dims[1] == 4104 else tensor_view("t", dims).reshape((128, 192, dims[1]))
    blocks = find_blocks(view, {"t": scales})
    firsts = first_of_blocks(view, tuple(n // size for n, size in zip(view.shape, blocks, strict=True)))
    assert view_of_scales(firsts, {"t": scales}).piece_count <= 2 * math.prod(-(-n // 128) for n in dims)


def test_a_repeated_element_has_the_scale_of_the_element():
    view = tensor_view("t", (1, 4)).broadcast((2, 4), (0, 1))
    scales = Scales((3, 4), (1, 2), (2, 1))
    assert find_blocks(view, {"t": scales}) == (2, 2)
    of_rows = view_of_scales(view, {"t": Scales((3, 4), (1, 4), (1, 1))})
    assert [*of_rows.pieces] == [StridedPiece((0, 0), (2, 4), "t", 0, (0, 0))]


def test_pieces_that_are_alike_have_the_scales_that_each_has_by_itself():
    """Of experts whose tensors have groups of two sizes, and whose first codes are in other groups."""
    scales = {
        f"{i}": Scales((12, 30), (4, 5), (6, 1)) if i % 3 else Scales((12, 30), (2, 30), (1, 1)) for i in range(60)
    }
    halves = [tensor_view(name, (12, 30)).slice((i % 5, 0), (i % 5 + 6, 30)) for i, name in enumerate(scales)]
    view = stack([stack(halves[i : i + 6], 0) for i in range(0, 60, 6)], 0)
    assert len(view.parts) == 1
    alone = [view_of_scales(View.of_pieces(view.shape, [piece]), scales) for piece in view.pieces]
    expected = [piece for each in alone for piece in each.pieces]
    assert sorted(view_of_scales(view, scales).pieces) == sorted(expected)
