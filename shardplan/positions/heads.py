"""Which heads the devices of a group have that exchange positions for heads (Ulysses). Pure arithmetic.

Key heads go where query heads need them: to several devices where they are fewer than these, and to no more.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class HeadCut:
    """`key_heads` x `per_key_head` query heads over `degree` devices."""

    degree: int
    key_heads: int
    per_key_head: int
    """Query heads of each."""

    @cached_property
    def slots(self) -> int:
        """Query heads of a device; the last devices may have some that are nobody's."""
        return -(-self.key_heads * self.per_key_head // self.degree)

    @property
    def padding(self) -> float:
        """Query heads that devices have, nobody's among them, of those that there are."""
        return self.degree * self.slots / (self.key_heads * self.per_key_head)

    @cached_property
    def needed(self) -> np.ndarray:
        """int[degree, slots]: the key head of every query head of a device."""
        heads = np.arange(self.degree * self.slots).reshape(self.degree, -1)
        return np.minimum(heads // self.per_key_head, self.key_heads - 1)

    @cached_property
    def sent(self) -> np.ndarray:
        """int[degree, n]: the key heads that each device gets; as many for all."""
        first = self.needed[:, :1]  # its heads follow one another
        return np.minimum(first + np.arange(self.most), self.needed[:, -1:])

    @property
    def most(self) -> int:
        """Key heads of the device that needs most."""
        heads = self.key_heads * self.per_key_head
        return max(
            (min(first + self.slots, heads) - 1) // self.per_key_head - first // self.per_key_head + 1
            for first in range(0, heads, self.slots)
        )

    @property
    def is_even(self) -> bool:
        """Whether every device gets key heads of its own, with all of their query heads."""
        return self.key_heads % self.degree == 0

    @property
    def received(self) -> int:
        """Key heads that all devices get together."""
        return self.key_heads if self.is_even else self.degree * self.most

    @property
    def key_heads_there(self) -> int:
        """Key heads that a device has for its query heads: one for each, where these are not groups of one size."""
        if self.is_even:
            return self.key_heads // self.degree
        return 1 if self.most == 1 else self.slots
