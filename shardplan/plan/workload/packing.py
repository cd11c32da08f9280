"""The number of windows of text that a sequence packs. Pure."""

from shardplan.positions.sequence_layout import KERNEL_BLOCK

MAX_BLOCKS = 4
"""Maximum number of kernel blocks in a packed sequence of short windows: attention computes scores across windows
too."""


def packed_length(window: int) -> int:
    """Return the sequence length that windows of `window` tokens fill best: a multiple of the kernel's block size.

    If several lengths are filled equally well, it is the shortest of them.

    >>> packed_length(100), packed_length(512), packed_length(700)
    (512, 512, 1536)
    """
    shortest = -(-window // KERNEL_BLOCK)
    lengths = [KERNEL_BLOCK * n for n in range(shortest, max(shortest, MAX_BLOCKS) + 1)]
    return min(lengths, key=lambda length: (length % window / length, length))
