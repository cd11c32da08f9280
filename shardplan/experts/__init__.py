"""MLPs of routed experts, sharded over devices: every token passes through the few experts that its router chose.

`shardplan.experts.block.routed_mlp` is the block, from named arrays to named arrays. It runs in a `jax.shard_map`; its
specs follow from the axis mapping in force: how experts are sharded, their hidden states, and tokens. A strategy says
what travels between devices (`shardplan.experts.method`): tokens are gathered, or exchanged, or the weights of experts
are gathered. No token is dropped: rows that do not fit in the buffers take further rounds (`shardplan.experts.rounds`).

Levanter's Mixtral and Qwen3-MoE get this block by `with_expert_parallel` (`shardplan.experts.levanter`). JAX and
Levanter are imported when a public name is first used, because plans contain methods.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.experts.levanter import with_expert_parallel
    from shardplan.experts.method import ExpertMethod, ExpertStrategy

__all__ = ["ExpertMethod", "ExpertStrategy", "with_expert_parallel"]

_MODULES = {
    "ExpertMethod": "shardplan.experts.method",
    "ExpertStrategy": "shardplan.experts.method",
    "with_expert_parallel": "shardplan.experts.levanter",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'shardplan.experts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
