"""Marks calls of attention while a program is traced, so that each of its operations knows its kind of attention.

Within `mark_attention`, Levanter's `dot_product_attention` and that of shardplan are replaced by a function that
computes attention in plain matmuls and a softmax, under a named scope for the kind of attention. The scope stands in
the name stack of every operation that the call leads to, those of its gradients included, and JAX keeps name stacks
through loops, rematerialization and transposition. `kind_of_label` reads the kind from the name stack.

A mask that is an array, such as one for documents, counts as the part of it that is known while tracing.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers import attention as levanter_attention
from levanter.layers.attention import AttentionBackend, AttentionMask

from shardplan.positions.pattern import Pattern
from shardplan.program.attention_kind import AttentionKind

FUNCTION = "dot_product_attention"
"""The name of the functions that are marked."""
OWN_MODULE = "shardplan.attention.dot_product"
"""The module of shardplan's own function, which is marked where a model has imported it."""
LEVANTER_ARGUMENTS = (
    "QPos", "KPos", "Key", "query", "key", "value", "mask", "bias", "attention_dtype", "precision", "use_flash",
    "attn_backend", "flash_block_size", "dropout",
)  # fmt: skip
"""The positional arguments of both functions."""
KEPT_ARGUMENTS = ("scaling_factor", "logits_soft_cap", "attn_sink")
"""Keyword arguments that change what attention computes."""
SCOPE = "shardplan_attention_"
"""Begins the named scope of a marked call; the number of its kind follows."""

_LOCK = RLock()
_KINDS: list[AttentionKind] = []
"""All kinds that this process has marked. JAX keeps traces of functions, so that a number keeps its meaning."""


@contextmanager
def mark_attention() -> Iterator[None]:
    """Replace the known functions of attention by marked plain ones, in every module that has imported one."""
    with _LOCK, ExitStack() as stack:
        levanter = getattr(levanter_attention, FUNCTION)
        known = [levanter]
        own = sys.modules.get(OWN_MODULE)
        if own is not None:
            known.append(vars(own)[FUNCTION])

        def marked(*args: Any, **kwargs: Any) -> NamedArray:
            """Compute attention in plain operations, under the scope of its kind."""
            arguments = {**dict(zip(LEVANTER_ARGUMENTS, args, strict=False)), **kwargs}
            with jax.named_scope(f"{SCOPE}{_number(_kind_of_call(arguments))}"):
                return _compute_plainly(levanter, arguments)

        for module in list(sys.modules.values()):
            # `vars` and not `getattr`, which would import what a module defers
            function = vars(module).get(FUNCTION) if isinstance(module, ModuleType) else None
            if any(function is each for each in known):
                stack.callback(setattr, module, FUNCTION, function)
                setattr(module, FUNCTION, marked)
        yield


def kind_of_label(label: str) -> AttentionKind | None:
    """Return the kind of attention that the name stack of an operation names; None outside of marked attention."""
    found = re.search(rf"{SCOPE}(\d+)", label)
    return _KINDS[int(found[1])] if found else None


def without_mark(label: str) -> str:
    """Return the name stack of an operation without the scope that marks attention."""
    return re.sub(rf"/?{SCOPE}\d+", "", label)


@cache
def _number(kind: AttentionKind) -> int:
    """Return the number of a kind of attention in this process."""
    _KINDS.append(kind)
    return len(_KINDS) - 1


def _kind_of_call(arguments: Mapping[str, Any]) -> AttentionKind:
    """Return the kind of a call of attention, by its arguments."""
    query, value = arguments["query"], arguments["value"]
    head_size = query.resolve_axis(arguments["Key"])
    value_sizes = [axis for axis in value.axes if axis.name not in {each.name for each in arguments["key"].axes}]
    return AttentionKind(
        pattern_of_mask(arguments.get("mask"), arguments.get("prefix", 0)),
        head_size.size,
        (*value_sizes, head_size)[0].size,
        arguments.get("logits_soft_cap"),
        arguments.get("attn_sink") is not None,
    )


def pattern_of_mask(mask: Any, prefix: int = 0) -> Pattern:
    """Return the part of a mask that is known while tracing; all pairs of positions for a mask that is an array.

    Args:
        prefix: number of first positions that all queries may attend to, with a causal mask.
    """
    if not isinstance(mask, AttentionMask):
        return Pattern()
    offset: Any = mask.causal_offset
    if isinstance(offset, NamedArray):
        offset = offset.array
    window, radius = mask.sliding_window, mask.bidirectional_window
    if offset is not None and mask.is_causal:
        if isinstance(offset, jax.core.Tracer) or jnp.ndim(offset) > 0:
            return Pattern(window=window, radius=radius)
        return Pattern(True, int(offset), window, prefix, radius)
    return Pattern(mask.is_causal, 0, window, prefix if mask.is_causal else 0, radius)


def _compute_plainly(levanter: Any, arguments: Mapping[str, Any]) -> NamedArray:
    """Compute attention by Levanter's plain implementation; what chooses another one is left out."""
    kept = {name: arguments[name] for name in KEPT_ARGUMENTS if name in arguments}
    positional = {name: arguments.get(name) for name in LEVANTER_ARGUMENTS[:10]}
    result: NamedArray = levanter(*positional.values(), attn_backend=AttentionBackend.VANILLA, inference=True, **kept)
    return result
