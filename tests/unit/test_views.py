"""A chain of operations on views locates every element as numpy does on an array of element numbers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.checkpoint.mapping.views import View, concatenate, stack, tensor_view


def materialise(view: View, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return the array that a view describes, with -1 for elements outside all pieces."""
    result = np.full(view.shape, -1, np.int64)
    for piece in view.pieces:
        flat = tensors[piece.tensor].reshape(-1)[piece.offset :]
        window = np.lib.stride_tricks.as_strided(flat, piece.shape, tuple(8 * k for k in piece.strides))
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        assert (result[box] == -1).all(), "pieces overlap"
        result[box] = window
    return result


def factorisations(n: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw random shapes of n elements."""

    def group(order: list[int], starts: list[bool]) -> tuple[int, ...]:
        shape = [1]
        for factor, starts_dimension in zip(order, starts, strict=True):
            if starts_dimension:
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape)

    factors = [p for p in (2, 3, 5, 7) for _ in range(int(math.log(n, p)) + 1) if n % p == 0]
    primes, quotient = [], n
    for p in factors:
        if quotient % p == 0:
            primes.append(p)
            quotient //= p
    return st.tuples(st.permutations(primes), st.lists(st.booleans(), min_size=len(primes), max_size=len(primes))).map(
        lambda pair: group(*pair)
    )


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_view_operations_agree_with_numpy(data):
    rows, columns = data.draw(st.sampled_from([(2, 6), (4, 6), (6, 10), (12, 1), (3, 4)]))
    count = data.draw(st.integers(1, 3))
    tensors = {f"t{i}": np.arange(rows * columns).reshape(rows, columns) + 1000 * i for i in range(count)}
    views = [tensor_view(name, value.shape) for name, value in tensors.items()]
    arrays = list(tensors.values())
    if data.draw(st.booleans()):
        axis = data.draw(st.integers(0, 2))
        view, array = stack(views, axis), np.stack(arrays, axis)
    else:
        axis = data.draw(st.integers(0, 1))
        view, array = concatenate(views, axis), np.concatenate(arrays, axis)
    for operation in data.draw(st.lists(st.sampled_from(["reshape", "transpose", "slice", "broadcast"]), max_size=5)):
        if operation == "reshape":
            shape = data.draw(factorisations(array.size))
            view, array = view.reshape(shape), array.reshape(shape)
        elif operation == "transpose":
            order = data.draw(st.permutations(range(array.ndim)))
            view, array = view.transpose(order), array.transpose(order)
        elif operation == "slice":
            start = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
            stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, array.shape, strict=True))
            view, array = view.slice(start, stop), array[tuple(map(slice, start, stop))]
            if array.size == 1 or any(array.size % p == 0 and p > 7 for p in range(8, array.size + 1)):
                break  # a prime factor that `factorisations` does not know
        else:
            axis = data.draw(st.integers(0, array.ndim))
            others = [d for d in range(array.ndim + 1) if d != axis]
            array = np.expand_dims(array, axis)
            view = view.broadcast(array.shape, others)
    np.testing.assert_array_equal(materialise(view, tensors), array)
    assert view.is_complete


@settings(max_examples=100)
@given(st.data())
def test_intersecting_pieces_with_boxes_partitions_the_view(data):
    tensors = {"a": np.arange(24).reshape(4, 6), "b": np.arange(24).reshape(4, 6) + 100}
    view = concatenate([tensor_view(name, t.shape) for name, t in tensors.items()], 0).reshape((2, 4, 2, 3))
    expected = materialise(view, tensors)
    splits = [data.draw(st.integers(0, n)) for n in view.shape]
    rebuilt = np.full(view.shape, -1)
    for corner in np.ndindex(*(2 for _ in splits)):
        low = tuple(0 if c == 0 else split for c, split in zip(corner, splits, strict=True))
        high = tuple(split if c == 0 else n for c, split, n in zip(corner, splits, view.shape, strict=True))
        for piece in view.pieces:
            part = piece.intersect(low, high)
            if part is not None:
                box = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
                rebuilt[box] = materialise(View.of_pieces(view.shape, [part]), tensors)[box]
    np.testing.assert_array_equal(rebuilt, expected)


def test_reshaping_an_empty_array():
    view = tensor_view("t", (4, 0)).reshape((0, 7)).reshape((2, 0, 3))
    assert view.shape == (2, 0, 3) and view.is_complete


def test_broadcast_repeats_elements():
    view = tensor_view("t", (3,)).broadcast((2, 3), (1,))
    np.testing.assert_array_equal(materialise(view, {"t": np.arange(3)}), [[0, 1, 2], [0, 1, 2]])


def test_missing_elements_make_a_view_incomplete():
    assert not concatenate([tensor_view("t", (3,)), View((2,))], 0).is_complete
