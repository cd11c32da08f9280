"""Bytes that a device receives for Native Sparse Attention with sharded positions. Pure arithmetic, for plans.

S positions are shared by P devices, each with G groups; rows have D = key_size + value_size channels of `itemsize`
bytes. A block of `block` tokens starts every `stride` tokens.

| what | collective | bytes |
|---|---|---|
| compression_halo: the end of compressed blocks | permute | itemsize * (block - stride) * G * D |
| compressed: keys and values of all compressed blocks | all-gather | itemsize * (P - 1) / P * S / stride * G * D |
| window_halo: the tokens before windows | permutes | itemsize * (window - 1) * G * D |
| selected: keys and values of all tokens | all-gather | itemsize * (P - 1) / P * S * G * D |

Halos are those of a contiguous device; in zigzag order a device has two parts, and receives at most twice as much.
The gathered rows include blocks that the end of the sequence leaves incomplete, which are dropped.
"""

from typing import NamedTuple

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts

FLOAT32_BYTES = 4


class SparseTraffic(NamedTuple):
    """Bytes per sequence and layer that a device receives, on the device that receives the most."""

    compression_halo: float
    compressed: float
    window_halo: float
    selected: float

    @property
    def permuted(self) -> float:
        """Bytes received in permutes."""
        return self.compression_halo + self.window_halo

    @property
    def gathered(self) -> float:
        """Bytes received in all-gathers, or in the reduce-scatters of their gradients."""
        return self.compressed + self.selected


def forward_traffic(config: NativeSparseConfig, parts: PositionParts, groups: int, itemsize: int) -> SparseTraffic:
    """Return the bytes that a device receives in a forward pass.

    >>> paper = NativeSparseConfig(
    ...     embed=2560, groups=4, heads_per_group=16, key_size=128, value_size=128,
    ...     block=32, stride=16, selection_block=64, selected=16, window=512,
    ... )
    >>> forward_traffic(paper, PositionParts(65536, devices=8), groups=4, itemsize=2)
    SparseTraffic(compression_halo=32768, compressed=7340032.0, window_halo=1046528, selected=117440512.0)

    Args:
        groups: heads of keys and values of a device.
        itemsize: bytes of a channel.
    """
    row = itemsize * _channels(config, groups)
    return _traffic(config, parts, row, row, is_backward=False)


def backward_traffic(config: NativeSparseConfig, parts: PositionParts, groups: int, itemsize: int) -> SparseTraffic:
    """Return the bytes that a device receives in a backward pass.

    Each transfer of the forward pass is reversed; gradients of gathered rows are float32. The recomputation of the
    forward pass is not included.

    >>> paper = NativeSparseConfig(
    ...     embed=2560, groups=4, heads_per_group=16, key_size=128, value_size=128,
    ...     block=32, stride=16, selection_block=64, selected=16, window=512,
    ... )
    >>> backward_traffic(paper, PositionParts(65536, devices=8), groups=4, itemsize=2)
    SparseTraffic(compression_halo=32768, compressed=14680064.0, window_halo=1046528, selected=234881024.0)
    """
    channels = _channels(config, groups)
    return _traffic(config, parts, itemsize * channels, FLOAT32_BYTES * channels, is_backward=True)


def importance_all_reduce_bytes(config: NativeSparseConfig, positions: int, groups: int, devices: int) -> float:
    """Return the bytes of the all-reduce of importance that sharding a group's heads would need.

    bytes = 2 * 4 * (devices - 1) / devices * positions * groups * selection blocks, for float32.

    >>> paper = NativeSparseConfig(
    ...     embed=2560, groups=4, heads_per_group=16, key_size=128, value_size=128,
    ...     block=32, stride=16, selection_block=64, selected=16, window=512,
    ... )
    >>> importance_all_reduce_bytes(paper, positions=65536, groups=4, devices=2) / 2**30
    1.0
    """
    elements = positions * groups * config.selection_blocks(positions)
    return 2 * FLOAT32_BYTES * (devices - 1) / devices * elements


def _channels(config: NativeSparseConfig, groups: int) -> int:
    return groups * (config.key_size + config.value_size)


def _traffic(
    config: NativeSparseConfig, parts: PositionParts, halo_row: int, gathered_row: int, is_backward: bool
) -> SparseTraffic:
    """Return the bytes that a device receives in one pass.

    Args:
        halo_row: bytes of a row's keys and values in a halo.
        gathered_row: bytes of a row's keys and values in an all-gather.
        is_backward: whether transfers are reversed.
    """
    others = (parts.devices - 1) / parts.devices
    window_hops = dict(enumerate(parts.halo_hops(min(config.window, parts.length) - 1), start=1))
    return SparseTraffic(
        compression_halo=halo_row * _received_rows(parts, {-1: config.block - config.stride}, is_backward),
        compressed=gathered_row * others * (parts.length // config.stride),
        window_halo=halo_row * _received_rows(parts, window_hops, is_backward),
        selected=gathered_row * others * parts.length,
    )


def _received_rows(parts: PositionParts, rows_at: dict[int, int], is_backward: bool) -> int:
    """Return the number of rows that the device with the most received rows receives.

    Args:
        rows_at: distance of parts (see `PositionParts.transfers`) -> rows of a part that are sent.
        is_backward: whether transfers are reversed, for gradients.
    """
    received = [0] * parts.devices
    for distance, rows in rows_at.items():
        for transfer in parts.transfers(distance):
            for source, target in transfer.pairs:
                received[source if is_backward else target] += rows
    return max(received)
