"""Gradient checkpointing: which activations of layers are kept, offloaded or recomputed for the gradients.

A policy is a kind, which says what happens to the inputs of layers and to all that has no name of its own, and the
names of activations that are kept beside, on the device or in the memory of the host. `nested:4` is a policy with four
blocks of layers. Its text, `default+attn_out+query_proj@host`, is the value of `workload.gradient_checkpointing`;
Levanter writes it `gradient_checkpointing: {save_block_internals: [attn_out], offload_block_internals: [query_proj]}`.
Imports no JAX, as configurations must not.
"""

from dataclasses import dataclass
from typing import Any

from shardplan.errors import nearest

OPEN_CHECKPOINTING = "auto"
"""Text that leaves the choice of the policy to the search."""
LEVANTER_FIELDS: dict[str, dict[str, Any]] = {
    "default": {}, "nested": {"nested": True}, "offload": {"save_carries": "offload", "save_inputs": "offload"},
    "offload_carries": {"save_carries": "offload"}, "recompute": {"save_carries": False},
}  # fmt: skip
"""Kind of policy -> the fields of Haliax's `ScanCheckpointPolicy` for it; such a kind may keep further activations.

Carries are the residual stream between layers; the inputs that `offload` moves to the host as well are the weights of
every layer, which is what the word means in Haliax."""
HALIAX_WORDS = ("default", "nested", "offload", "recompute", "save_all")
"""Kinds for which Haliax has a word; `default` is true there."""
KINDS = (*LEVANTER_FIELDS, "save_all")
DEFAULT = "default"
NESTED = "nested"
HOST = "@host"
"""Ending of the name of an activation that is kept in host memory."""
ALIASES = {"true": "default", "false": "save_all", "full": "recompute", "none": "save_all"}
"""Other names that users write, as in Levanter's configuration -> shardplan's name."""


@dataclass(frozen=True)
class CheckpointPolicy:
    """A gradient checkpointing policy: which activations are kept, offloaded or recomputed."""

    kind: str = "default"
    """One of `KINDS`."""
    kept: tuple[str, ...] = ()
    """Names of activations that stay on the device."""
    offloaded: tuple[str, ...] = ()
    """Names of activations that are copied to the host, and back for the gradients."""
    blocks: int | None = None
    """For `nested`: number of blocks of layers; only the inputs of blocks are kept. None for about the square root of
    the number of layers."""

    @staticmethod
    def parse(text: str) -> "CheckpointPolicy":
        """Parse the text of a policy, without the checks of `checkpointing_problem`.

        >>> CheckpointPolicy.parse("default+attn_out+query_proj@host")
        CheckpointPolicy(kind='default', kept=('attn_out',), offloaded=('query_proj',), blocks=None)
        >>> CheckpointPolicy.parse("nested:4").blocks
        4
        """
        kind, *names = text.split("+")
        kind, colon, number = kind.partition(":")
        blocks = None
        if kind == NESTED and number.isascii() and number.isdigit():
            blocks = int(number)
        else:
            kind += colon + number  # of no known kind
        kept = tuple(name for name in names if not name.endswith(HOST))
        offloaded = tuple(name.removesuffix(HOST) for name in names if name.endswith(HOST))
        return CheckpointPolicy(kind, kept, offloaded, blocks)

    def __str__(self) -> str:
        kind = self.kind if self.blocks is None else f"{self.kind}:{self.blocks}"
        return "+".join((kind, *self.kept, *(f"{name}{HOST}" for name in self.offloaded)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all activations that are kept or offloaded."""
        return self.kept + self.offloaded

    @property
    def copied(self) -> int:
        """Number of activations that are copied to the host; the inputs of layers count as one."""
        return len(self.offloaded) + (self.kind in ("offload", "offload_carries"))

    @property
    def levanter_value(self) -> str | dict[str, Any]:
        """Value of `gradient_checkpointing` in a Levanter file: a word, or the fields of a policy.

        >>> CheckpointPolicy("recompute", ("attn_out",)).levanter_value
        {'save_carries': False, 'save_block_internals': ['attn_out']}
        """
        if not self.names and self.kind in HALIAX_WORDS and self.blocks is None:
            return self.kind
        fields = dict(LEVANTER_FIELDS[self.kind])
        if self.blocks is not None:
            fields[NESTED] = self.blocks
        if self.kept:
            fields["save_block_internals"] = [*self.kept]
        if self.offloaded:
            fields["offload_block_internals"] = [*self.offloaded]
        return fields


def checkpointing_problem(key: str, text: str) -> str | None:
    """Explain what is wrong with the text of a policy; None if nothing is.

    >>> checkpointing_problem("workload.gradient_checkpointing", "nested:4")
    >>> checkpointing_problem("workload.gradient_checkpointing", "ofload")
    "workload.gradient_checkpointing is 'ofload'; did you mean 'offload'?"
    """
    if text == OPEN_CHECKPOINTING:
        return None
    policy = CheckpointPolicy.parse(text)
    if policy.kind not in KINDS:
        return f"{key} is {text!r}; {nearest(policy.kind, sorted((OPEN_CHECKPOINTING, *KINDS)), ALIASES)}"
    if policy.names and policy.kind not in LEVANTER_FIELDS:
        return f"{key} is {text!r}; names of activations go with {', '.join(LEVANTER_FIELDS)}"
    if policy.blocks == 0:
        return f"{key} is {text!r}; nested takes at least one block of layers"
    if not all(policy.names):
        return f"{key} is {text!r}; it lacks a name, as in {policy.kind}+attn_out"
    return None
