"""What a family of models is: how its config.json is read, and where its checkpoints have each parameter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.rules import top_rules
from shardplan.decoder.names import Rule
from shardplan.decoder.parts.block import LayerConfig


def no_constants(config: Architecture, layer: LayerConfig, index: int) -> Mapping[str, float]:
    """Return none: all that checkpoints of most families hold for a layer is parameters."""
    return {}


@dataclass(frozen=True)
class Family:
    """A family of models that are compositions of the decoder's parts."""

    read: Callable[[ConfigKeys], dict[str, Any]]
    """Return the fields of the `Architecture`, but `hf_config`, of a config.json."""
    layer_rules: Callable[[Architecture, LayerConfig, int], Mapping[str, Rule]]
    """Return path of a parameter in a layer -> its rule, for the layer of this index."""
    rules: Callable[[Architecture, int], Mapping[str, Rule]] = top_rules
    """Return path of a parameter that is in no layer -> its rule, for a vocabulary of this many tokens."""
    constants: Callable[[Architecture, LayerConfig, int], Mapping[str, float]] = no_constants
    """Return name -> value of the scalars that checkpoints hold for a layer though they are no parameters."""
