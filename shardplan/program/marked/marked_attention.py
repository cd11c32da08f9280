"""Marks calls of attention while a program is traced, so that each of its operations knows its kind of attention.

Within `mark_attention`, calls of attention compute plain matmuls and a softmax, under a named scope for the kind of
attention. The scope stands in the name stack of every operation that the call leads to, the operations of its gradients
included, and JAX keeps name stacks through loops, rematerialization and transposition. `kind_of_label` reads the kind
from the name stack.

A mask that is an array, such as one for documents, counts as the part of it that is known while tracing.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.attention import AttentionBackend, materialize_mask
from levanter.layers.attention import dot_product_attention as levanter_attention

from shardplan.model.attention.attention_calls import POSITIONAL, Arguments, replace_attention
from shardplan.model.attention.mask_pattern import pattern_of_mask
from shardplan.program.marked.attention_kind import AttentionKind

POSITIONAL_OF_RESULT = POSITIONAL[: POSITIONAL.index("use_flash")]
"""Positional arguments that affect the result; others choose an implementation, or are for dropout."""
KEYWORDS_OF_RESULT = ("scaling_factor", "logits_soft_cap")
"""Keyword arguments, other than sinks, that affect the result."""
SCOPE = "shardplan_attention_"
"""Prefix of the named scope of a marked call; the index of the call's kind follows."""

_KINDS: list[AttentionKind] = []
"""All kinds that this process has marked, by index; an index stays valid because JAX caches traces of functions."""


@contextmanager
def mark_attention(uses_own_kernel: bool = False) -> Iterator[None]:
    """Mark every call of attention with its kind, and compute it in plain operations.

    Args:
        uses_own_kernel: see `AttentionKind.uses_own_kernel`.
    """

    def compute(arguments: Arguments) -> NamedArray:
        """Compute attention under the scope of its kind."""
        kind = replace(kind_of_call(arguments), uses_own_kernel=uses_own_kernel)
        with jax.named_scope(f"{SCOPE}{_number(kind)}"):
            if arguments.get("attn_sink") is not None:
                return _attend_with_sinks(arguments)
            positional = [arguments.get(name) for name in POSITIONAL_OF_RESULT]
            keywords = {name: arguments[name] for name in KEYWORDS_OF_RESULT if name in arguments}
            result: NamedArray = levanter_attention(
                *positional, attn_backend=AttentionBackend.VANILLA, inference=True, **keywords
            )
        return result

    with replace_attention(compute):
        yield


def _attend_with_sinks(arguments: Arguments) -> NamedArray:
    """Compute attention with a sink per head, without adding a key for the sink to the scores.

    Levanter's plain implementation adds a key for the sink, and no axis has the size that results.
    """
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    head_size = query.resolve_axis(arguments["Key"])
    queries, keys = query.resolve_axis(arguments["QPos"]), key.resolve_axis(arguments["KPos"])
    scale = arguments.get("scaling_factor") or head_size.size**-0.5
    scores = hax.dot(query * scale, key, axis=head_size).astype(jnp.float32)
    cap = arguments.get("logits_soft_cap")
    if cap is not None:
        scores = cap * hax.tanh(scores / cap)
    allowed = materialize_mask(arguments.get("mask"), queries, keys)
    if allowed is not None:
        scores = hax.where(allowed, scores, -1e9)  # as Levanter's plain attention has it
    sinks = arguments["attn_sink"].astype(jnp.float32)
    largest = hax.maximum(hax.max(scores, keys), sinks)
    weights = hax.exp(scores - largest)
    weights = weights / (hax.sum(weights, keys) + hax.exp(sinks - largest))
    return hax.dot(weights.astype(value.dtype), value, axis=keys)


def kind_of_label(label: str) -> AttentionKind | None:
    """Return the kind of attention in the name stack of an operation; None outside of marked attention."""
    found = re.search(rf"{SCOPE}(\d+)", label)
    return _KINDS[int(found[1])] if found else None


def without_mark(label: str) -> str:
    """Return the name stack of an operation without the scope of a marked attention."""
    return re.sub(rf"/?{SCOPE}\d+", "", label)


@cache
def _number(kind: AttentionKind) -> int:
    """Return the index of a kind of attention in this process."""
    _KINDS.append(kind)
    return len(_KINDS) - 1


def kind_of_call(arguments: Arguments) -> AttentionKind:
    """Return the kind of a call of attention."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    head_size = query.resolve_axis(arguments["Key"])
    axes_of_keys = {axis.name for axis in key.axes}
    value_sizes = [axis for axis in value.axes if axis.name not in axes_of_keys]
    return AttentionKind(
        pattern_of_mask(arguments.get("mask"), arguments.get("prefix", 0)),
        head_size.size,
        (*value_sizes, head_size)[0].size,
        arguments.get("logits_soft_cap"),
        arguments.get("attn_sink") is not None,
        arguments.get("bias") is not None,
    )
