"""Names of the logical axes of attention and of blocks of routed experts, which the search treats in their own way."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class AttentionAxes:
    """Names of the logical axes of one kind of attention."""

    heads: tuple[str, ...]
    """Axes that number query heads in scores, major to minor; keys have the first one."""
    flat_heads: str
    """Axis that numbers query heads in the output projection: `heads`, flattened to one axis."""
    head_size: str

    @property
    def unsharded_in_kernels(self) -> tuple[str, ...]:
        """Axes that must be unsharded inside Levanter's splash attention, however they are sharded outside."""
        return (*self.heads[1:], self.head_size)


class ExpertAxes(NamedTuple):
    """Names of the logical axes of the weights of one kind of block of experts."""

    experts: str
    embed: str
    """Axis of a token's elements."""
    mlp: str
    """Axis of a hidden state's elements."""
