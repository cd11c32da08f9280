"""One decoder for all supported families of models; a family only says how it is composed of the decoder's parts.

The parts (`shardplan.decoder.parts`) are attention, MLPs, norms, rotary embeddings, and the wiring that joins them to a
layer. A family (`shardplan.decoder.families`) is two functions: one reads a config.json into the layers of a
`DecoderConfig`, and one gives the rules (`shardplan.decoder.names`) by which a checkpoint holds the parameters of a
layer. Loading, streaming and saving follow from the rules. A `Decoder` is a Levanter `LmHeadModel`, so Levanter's
Trainer trains it like Levanter's own models.

The layer of Native Sparse Attention is also a module of its own. It is imported when its name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
    from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
    from shardplan.decoder.parts.attention.sparse.native_sparse_attention import NativeSparseAttention

__all__ = ["NativeSparseAttention", "NativeSparseConfig", "SelectedMethod"]

_MODULES = {
    "NativeSparseAttention": "shardplan.decoder.parts.attention.sparse.native_sparse_attention",
    "NativeSparseConfig": "shardplan.decoder.parts.attention.sparse.config",
    "SelectedMethod": "shardplan.decoder.parts.attention.sparse.branches.selected_branch",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'shardplan.decoder' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
