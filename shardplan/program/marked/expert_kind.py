"""Kinds of blocks of routed experts, as a trace marks them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertKind:
    """The sizes and options of a block of routed experts."""

    experts: int
    experts_per_token: int
    embed: int
    """Elements of a token."""
    mlp: int
    """Elements of the hidden state of an expert."""
    has_gate: bool = True
    has_bias: bool = False
    weighs_inputs: bool = False
    """Whether the routing weight multiplies the expert's input rather than its output."""
    load_spread: float = 0.0
    """Standard deviation / mean of the experts' numbers of rows."""

    @property
    def matrices(self) -> int:
        """Number of matrices per expert."""
        return 3 if self.has_gate else 2

    @property
    def name(self) -> str:
        """The name of the kind in plans, such as `8 experts, 2 per token, hidden size 14336`."""
        return f"{self.experts} experts, {self.experts_per_token} per token, hidden size {self.mlp}"
