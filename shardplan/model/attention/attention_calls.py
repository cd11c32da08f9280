"""Replaces the functions of attention that models call: Levanter's `dot_product_attention`, and shardplan's two.

A model of your own may call them by any name of any module, and none of its modules need be Levanter's `Attention`. So
the function is replaced in every module that has imported it, for a while, in which the model is traced. A trace uses
this to mark attention (`shardplan.program.marked_attention`), a run to compute it as planned
(`shardplan.execution.planned_attention`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

from haliax import NamedArray
from levanter.layers import attention as levanter_attention
from levanter.layers.attention import Attention
from levanter.models.olmo import Olmo2Attention

FUNCTION = "dot_product_attention"
"""The name of the functions."""
OWN_MODULES = ("shardplan.attention.dot_product", "shardplan.decoder.parts.levanter_attention")
"""The modules of shardplan's functions: of the sequence-parallel one, and of that of the decoder."""
POSITIONAL = (
    "QPos", "KPos", "Key", "query", "key", "value", "mask", "bias", "attention_dtype", "precision", "use_flash",
    "attn_backend", "flash_block_size", "dropout",
)  # fmt: skip
"""The positional arguments of these functions."""

Arguments = Mapping[str, Any]
"""The arguments of a call, by name."""

REPLACEABLE_CALLS = (Attention.__call__, Olmo2Attention.__call__)
"""What modules of Levanter's `Attention` do that `shardplan.attention.levanter` can do in their place, in any order of
positions. Other subclasses do more, such as sinks: of these, the function that they call is replaced."""

_LOCK = RLock()


@contextmanager
def replace_attention(compute: Callable[[Arguments], NamedArray]) -> Iterator[None]:
    """Let `compute` compute every call of attention.

    Another thread that replaces attention waits, so that the two do not mix.

    Args:
        compute: takes the arguments of a call by their names, and returns its result.
    """

    def replacement(*args: Any, **kwargs: Any) -> NamedArray:
        """Compute attention."""
        return compute({**dict(zip(POSITIONAL, args, strict=False)), **kwargs})

    with _LOCK, ExitStack() as stack:
        known = [getattr(levanter_attention, FUNCTION)]
        for name in OWN_MODULES:
            if name in sys.modules:
                known.append(vars(sys.modules[name])[FUNCTION])
        for module in list(sys.modules.values()):
            # `vars` and not `getattr`, which would import what a module defers
            function = vars(module).get(FUNCTION) if isinstance(module, ModuleType) else None
            if any(function is each for each in known):
                stack.callback(setattr, module, FUNCTION, function)
                setattr(module, FUNCTION, replacement)
        yield
