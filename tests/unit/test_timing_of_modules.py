"""Step times of real compiled modules agree with calculations by hand from their cycles and bytes."""

import pytest
from hlo_modules import read_text
from hlo_steps import CLOCK, HBM, HOP, LINK, NETWORK, RING, timing, uses_of


def test_asynchronous_gather_of_a_real_module():
    """Each of five layers gathers w and waits, gathers v beside the matmul with w, and sums over `model`."""
    result = timing(read_text("async_gather"), "v4:4x4x4", (1, 16, 4))
    gathered = 15 * 2048 * 128 * 2
    summed = 2 * 3 / 4 * 4096 * 2048 * 2
    assert uses_of(result) == [
        ("all-gather", ("data",), gathered, "sync", 5),
        ("all-gather", ("data",), gathered, "async", 5),
        ("all-reduce", ("model",), summed, "sync", 5),
    ]
    cycles = 3224 + 3224 + 147594 + 147594
    assert result.compute_seconds == pytest.approx(5 * cycles / CLOCK)
    # x is copied to the memory near the core before the loop, and back after it; both copies block;
    # the 48 microseconds of the second gather overlap the 141 of the matmul
    copies = 2 * 4096 * 2048 * 2 / HBM
    # `data` has two rings of four, with two hops to the far side; `model` has one, and an all-reduce goes around twice
    sent = gathered / (2 * RING) + 4 * HOP + summed / RING + 4 * HOP
    assert result.seconds == pytest.approx(copies + 5 * (cycles / CLOCK + sent))
    assert not result.not_understood


def test_windowed_matmul_of_a_real_module():
    """Per layer one shard arrives from one side without overlap, then twice two shards from each side, overlapped."""
    result = timing(read_text("windowed"), "v4:2x2x4", (1, 8, 2))
    part = 64 * 1024 * 2
    permutes = [("collective-permute", ("data",), part, "windowed", 14)] * 4
    assert uses_of(result) == [("collective-permute", ("data",), part, "async", 7), *permutes]
    layer = 1255 + 2 * (611 + 16404 + 17696) + 20662
    # `data` is 2 x 4 without wraparound: the ends of a line of 4 are 4 hops apart for a shift by one
    assert result.seconds == pytest.approx((9060 + 7 * layer) / CLOCK + 7 * (part / LINK + 4 * HOP))
    assert not result.not_understood


def test_reduce_scatter_of_a_real_module():
    """In a fusion of an all-reduce and a slice of its result each device receives 15 of 16 shards, not twice that."""
    result = timing(read_text("reduce_scatter"), "v4:4x4x4", (1, 16, 4))
    received = 15 / 16 * 512 * 1024 * 2
    assert uses_of(result) == [("reduce-scatter", ("data",), received, "sync", 1)]
    copied = 512 * 1024 * 2 / HBM
    assert result.seconds == pytest.approx(13411 / CLOCK + copied + received / (2 * RING) + 4 * HOP)


def test_two_slices_of_a_real_module():
    """A sum goes over links within each slice, then each device exchanges its shard with the other slice by network."""
    result = timing(read_text("two_slices"), "2xv4:2x2x2", (2, 4, 2))
    within, across = 3 * 128 * 1024 * 2, 128 * 1024 * 2
    assert uses_of(result) == [
        ("all-gather", ("data",), within, "sync", 1),
        ("reduce-scatter", ("data",), within, "sync", 1),
        ("all-reduce", ("replica",), across, "async", 1),
    ]
    sent = 2 * (within / RING + 2 * HOP) + across / NETWORK
    assert result.seconds == pytest.approx((9815 + 1911) / CLOCK + sent)


def test_a_real_exchange_of_ragged_rows():
    """Each of 4 devices receives three quarters of its 1024 rows of 1024 bfloat16 numbers."""
    [use] = timing(read_text("ragged_all_to_all"), "v5p-8", (1, 4, 1)).uses
    assert (use.transfer.kind, use.transfer.mesh_axes) == ("ragged-all-to-all", ("data",))
    assert use.transfer.bytes == 3 / 4 * 1024 * 1024 * 2
