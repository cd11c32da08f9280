"""Keeps weights of the decoder as their checkpoint stores them, see `shardplan.model.dtypes.kept_weights`.

These are the weights of linear projections and of experts in layers, unless the configuration lists their modules as
plain. A parameter with a plain tensor among its tensors, in any layer, is loaded as numbers. Routers, norms, biases,
the embedding and the output head are numbers in all releases.
"""

from dataclasses import replace
from typing import Any

import jax
from haliax import NamedArray

from shardplan.decoder.names import Rule, stored_tensors
from shardplan.decoder.parameter_rules import parameter_rules
from shardplan.decoder.parts.linear import Linear
from shardplan.decoder.weight_blocks import blocks_of_rule
from shardplan.experts.expert_weights import ExpertWeights
from shardplan.model.dtypes.kept_weights import placeholder_of
from shardplan.model.huggingface.quantization import ByteCodes

LAYERS = "segments["
"""Beginning of the paths of layer parameters."""
MATRICES = ("gate", "up", "down")
"""The weights, not biases, of experts."""


def keep_weights(model: Any, codes: ByteCodes) -> Any:
    """Replace weights by arrays of codes with scales, for weights that the checkpoint stores as one-byte codes.

    The arrays are placeholders of the right shapes; see `shardplan.model.dtypes.kept_weights`.

    Args:
        codes: how the checkpoint stores weights.
    """
    rules = parameter_rules(model.settings, model.Vocab.size)

    def keep(path: str, weight: NamedArray) -> Any:
        rule = rules[path]
        if _has_plain_tensor(rule, codes):
            return weight
        return placeholder_of(weight, blocks_of_rule(rule, codes, weight.array.shape), codes.dtype)

    def keep_in(path: Any, node: Any) -> Any:
        at = jax.tree_util.keystr(path).lstrip(".")
        if not at.startswith(LAYERS):
            return node
        if isinstance(node, Linear):
            return replace(node, weight=keep(f"{at}.weight", node.weight))
        if isinstance(node, ExpertWeights):
            matrices = {name: getattr(node, name) for name in MATRICES}
            kept = {name: keep(f"{at}.{name}", each) for name, each in matrices.items() if each is not None}
            return replace(node, **kept)
        return node

    return jax.tree_util.tree_map_with_path(keep_in, model, is_leaf=_has_weights)


def _has_plain_tensor(rule: Rule, codes: ByteCodes) -> bool:
    """Return whether the checkpoint stores any tensor of a parameter unquantized, according to its config.json."""
    return bool(codes.plain_modules) and any(codes.is_plain(stored.name) for stored in stored_tensors(rule))


def _has_weights(node: Any) -> bool:
    return isinstance(node, Linear | ExpertWeights)
