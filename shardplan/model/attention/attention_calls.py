"""Replaces the attention functions that models call: Levanter's and shardplan's `dot_product_attention`.

A model of your own may call such a function from any module, without Levanter's `Attention`. So while the model is
traced, the name is replaced in every module that has imported the function. A planner's trace uses this to mark
attention (`shardplan.program.marked.marked_attention`), and a run uses it to compute attention as planned
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
"""The name of all replaced attention functions."""
OWN_MODULES = ("shardplan.attention.dot_product", "shardplan.decoder.parts.attention.levanter_attention")
"""The modules of shardplan's two functions: sequence-parallel attention, and the decoder's attention."""
POSITIONAL = (
    "QPos", "KPos", "Key", "query", "key", "value", "mask", "bias", "attention_dtype", "precision", "use_flash",
    "attn_backend", "flash_block_size", "dropout",
)  # fmt: skip
"""The positional arguments of the replaced attention functions."""

Arguments = Mapping[str, Any]
"""The arguments of a call, by name."""

REPLACEABLE_CALLS = (Attention.__call__, Olmo2Attention.__call__)
"""Forward methods of Levanter's attention that `shardplan.attention.levanter` can replace, for any order of positions.

Other subclasses of `Attention` do more, such as sinks; for them, only the function that they call is replaced."""

_LOCK = RLock()


@contextmanager
def replace_attention(compute: Callable[[Arguments], NamedArray]) -> Iterator[None]:
    """Replace every call of attention by `compute` within the context.

    Another thread that replaces attention waits until the context ends.

    Args:
        compute: takes the arguments of a call by their names, and returns its result.
    """

    def replacement(*args: Any, **kwargs: Any) -> NamedArray:
        """Compute attention with the replacement, from arguments by name."""
        return compute({**dict(zip(POSITIONAL, args, strict=False)), **kwargs})

    with _LOCK, ExitStack() as stack:
        known = [getattr(levanter_attention, FUNCTION)]
        for name in OWN_MODULES:
            if name in sys.modules:
                known.append(vars(sys.modules[name])[FUNCTION])
        for module in list(sys.modules.values()):
            # not `getattr`, which would run the lazy imports of a module
            function = vars(module).get(FUNCTION) if isinstance(module, ModuleType) else None
            if any(function is each for each in known):
                stack.callback(setattr, module, FUNCTION, function)
                setattr(module, FUNCTION, replacement)
        yield
