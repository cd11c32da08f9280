"""Defines a family of models: how its config.json is read, and where its checkpoints hold each parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.rules import top_rules
from shardplan.decoder.names import Rule
from shardplan.decoder.parts.block import LayerConfig


def _no_constants(config: Architecture, layer: LayerConfig, index: int) -> Mapping[str, float]:
    """Return no constants, for the families whose checkpoints hold only a layer's parameters."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models, which are composed of the decoder's parts."""

    read: Callable[[ConfigKeys], dict[str, Any]]
    """Read the fields of an `Architecture`, except `hf_config`, from a config.json."""
    layer_rules: Callable[[Architecture, LayerConfig, int], Mapping[str, Rule]]
    """Return the rules that make the parameters of this layer from checkpoint tensors, by path in the layer."""
    rules: Callable[[Architecture, int], Mapping[str, Rule]] = top_rules
    """Return the rules that make parameters outside of layers from tensors, by path, for a vocabulary of this size."""
    constants: Callable[[Architecture, LayerConfig, int], Mapping[str, float]] = _no_constants
    """Return name -> value of the scalars that checkpoints hold for a layer, but that are no parameters."""
    dispensable: tuple[str, ...] = ()
    """Parts of the names of a layer's tensors that the decoder does not need."""
    stores_inputs_first: bool = False
    """Whether the weights of linear layers, except the output head, are stored as {inputs, outputs}."""
