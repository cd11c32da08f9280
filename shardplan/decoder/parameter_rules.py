"""Makes the loading rules of all parameters of a decoder from its family's rules for a single layer.

The model stacks the parameters of a segment's repetitions along the first axis, so their rules are stacked as well.
"""

from collections.abc import Mapping
from functools import lru_cache

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.families import family_of
from shardplan.decoder.names import Rule, Stacked


@lru_cache(maxsize=8)  # a model with routed experts has rules of a hundred thousand tensors
def parameter_rules(config: Architecture, vocab: int) -> Mapping[str, Rule]:
    """Return the loading rules of all parameters, by path in the model; a rule gives the elements in any shape.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("gemma-2-2b", None))
    >>> rules = parameter_rules(config, vocab=256000)
    >>> [each.name for each in rules["segments[0].stacked.layers[1].self_attn.k_proj.weight"].rules[:2]]
    ['model.layers.1.self_attn.k_proj.weight', 'model.layers.3.self_attn.k_proj.weight']

    Args:
        vocab: number of tokens in the vocabulary.
    """
    family = family_of(config)
    rules = dict(family.rules(config, vocab))
    first = 0
    for i, segment in enumerate(config.segments):
        size = len(segment.layers)
        for j, layer in enumerate(segment.layers):
            indices = range(first + j, first + segment.num_layers, size)
            of_layers = [family.layer_rules(config, layer, index) for index in indices]
            for path in of_layers[0]:  # repetitions have one configuration, and so the same parameters
                stacked = Stacked(tuple(each[path] for each in of_layers))
                rules[f"segments[{i}].stacked.layers[{j}].{path}"] = stacked
        first += segment.num_layers
    return rules


def stored_constants(config: Architecture) -> dict[str, float]:
    """Return name -> value of the scalars in a checkpoint that are not parameters.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> constants = stored_constants(DecoderConfig.from_hf_config(read_config("apertus-8b", None)))
    >>> len(constants), constants["model.layers.31.mlp.act_fn.beta"]
    (64, 0.5)
    """
    constants: dict[str, float] = {}
    index = 0
    for segment in config.segments:
        for layer in segment.layers * segment.repeats:
            constants.update(family_of(config).constants(config, layer, index))
            index += 1
    return constants
