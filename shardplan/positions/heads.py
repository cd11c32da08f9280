"""Assigns attention heads to the devices of a Ulysses group. Pure arithmetic.

Every device gets the key heads that its query heads use: one key head goes to several devices if there are fewer key
heads than devices, and to no device that does not use it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class HeadSharding:
    """The division of `key_heads` x `queries_per_key_head` query heads among `degree` devices."""

    degree: int
    key_heads: int
    queries_per_key_head: int
    """Query heads per key head."""

    @cached_property
    def query_heads_per_device(self) -> int:
        """Number of query heads of each device; the last devices may have padding heads."""
        return -(-self.key_heads * self.queries_per_key_head // self.degree)

    @property
    def padding_ratio(self) -> float:
        """Number of query heads with padding, divided by the number of query heads without padding."""
        return self.degree * self.query_heads_per_device / (self.key_heads * self.queries_per_key_head)

    @cached_property
    def key_head_of_query(self) -> np.ndarray:
        """Key head of each query head of each device, int[degree, query_heads_per_device]."""
        heads = np.arange(self.degree * self.query_heads_per_device).reshape(self.degree, -1)
        return np.minimum(heads // self.queries_per_key_head, self.key_heads - 1)

    @cached_property
    def key_heads_received(self) -> np.ndarray:
        """Key heads that each device receives, int[degree, max_key_heads]; the last one is repeated as padding."""
        first = self.key_head_of_query[:, :1]  # the key heads of a device are consecutive
        return np.minimum(first + np.arange(self.max_key_heads), self.key_head_of_query[:, -1:])

    @property
    def max_key_heads(self) -> int:
        """Largest number of different key heads that the query heads of one device use."""
        heads, per_device = self.key_heads * self.queries_per_key_head, self.query_heads_per_device
        return max(
            (min(first + per_device, heads) - 1) // self.queries_per_key_head - first // self.queries_per_key_head + 1
            for first in range(0, heads, per_device)
        )

    @property
    def is_even(self) -> bool:
        """Whether every device gets key heads that no other device has, each with all of its query heads."""
        return self.key_heads % self.degree == 0

    @property
    def total_key_heads_received(self) -> int:
        """Number of key heads that all devices receive together, copies included."""
        return self.key_heads if self.is_even else self.degree * self.max_key_heads

    @property
    def key_heads_after_duplication(self) -> int:
        """Number of key heads in the attention of one device.

        It is `max_key_heads` if no key head is on two devices, or if each device has only one. Otherwise the query
        heads of a device may divide unevenly among its key heads, so that each query head gets its own copy of its key
        head.
        """
        if self.is_even:
            return self.key_heads // self.degree
        return 1 if self.max_key_heads == 1 else self.query_heads_per_device
