"""Gradient checkpointing in words: a kind, and the names of further activations that training keeps.

`default+attn_out+mlp_out` is Levanter's `gradient_checkpointing: {save_block_internals: [attn_out, mlp_out]}`. Imports
no JAX, as configurations must not.
"""

from collections.abc import Sequence
from typing import Any

from shardplan.errors import nearest

CHECKPOINTING = ("auto", "default", "nested", "offload", "recompute", "save_all")
"""The kinds."""
ALIASES = {"true": "default", "false": "save_all", "full": "recompute", "none": "save_all"}
"""What else users write, as in Levanter's configuration -> its name here."""
WITH_NAMES = ("default", "nested", "offload", "recompute")
"""The kinds that may keep further activations."""
RING_RESIDUALS = "shardplan_attention"
"""Name of the output and the log-sum-exp of ring attention: if they are kept, the backward pass repeats no hop. No
traced step has it, because attention is traced as plain matmuls."""
LEVANTER_FIELDS: dict[str, dict[str, Any]] = {
    "default": {}, "nested": {"nested": True}, "offload": {"save_carries": "offload", "save_inputs": "offload"},
    "recompute": {"save_carries": False},
}  # fmt: skip
"""Kind -> the fields of Haliax's `ScanCheckpointPolicy` that make it."""


def split_checkpointing(value: str) -> tuple[str, tuple[str, ...]]:
    """Return the kind, and the names of the activations that are kept beside.

    >>> split_checkpointing("default+attn_out+mlp_out")
    ('default', ('attn_out', 'mlp_out'))
    """
    kind, *names = value.split("+")
    return kind, tuple(names)


def join_checkpointing(kind: str, names: Sequence[str]) -> str:
    """Return the value of `workload.gradient_checkpointing` for a kind and names."""
    return "+".join((kind, *names))


def checkpointing_problem(key: str, value: str) -> str | None:
    """Return what is wrong with a value, if anything."""
    kind, names = split_checkpointing(value)
    if kind not in CHECKPOINTING:
        return f"{key} is {value!r}; {nearest(kind, CHECKPOINTING, ALIASES)}"
    if names and kind not in WITH_NAMES:
        return f"{key} is {value!r}; names of activations go with {', '.join(WITH_NAMES)}"
    if not all(names):
        return f"{key} is {value!r}; it lacks a name, as in {kind}+attn_out"
    return None


def policy_fields(value: str) -> dict[str, Any] | None:
    """Return the fields of Haliax's `ScanCheckpointPolicy` for a value with names; None for one without."""
    kind, names = split_checkpointing(value)
    return {**LEVANTER_FIELDS[kind], "save_block_internals": [*names]} if names else None
