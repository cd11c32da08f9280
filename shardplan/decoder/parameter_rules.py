"""The rule of every parameter of a decoder, made of those of its family for one layer."""

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.families import family_of
from shardplan.decoder.names import Rule, Stacked


def parameter_rules(config: Architecture, vocab: int) -> dict[str, Rule]:
    """Return path of a parameter in the model -> its rule, with the shape of the parameter or as many elements.

    Args:
        vocab: tokens of the vocabulary.
    """
    family = family_of(config)
    rules = dict(family.rules(config, vocab))
    first = 0
    for i, segment in enumerate(config.segments):
        size = len(segment.layers)
        for j, layer in enumerate(segment.layers):
            indices = range(first + j, first + segment.num_layers, size)
            of_layers = [family.layer_rules(config, layer, index) for index in indices]
            for path in of_layers[0]:
                stacked = Stacked(tuple(each[path] for each in of_layers))
                rules[f"segments[{i}].stacked.layers[{j}].{path}"] = stacked
        first += segment.num_layers
    return rules


def stored_constants(config: Architecture) -> dict[str, float]:
    """Return name -> value of the scalars that a checkpoint holds though they are no parameters."""
    constants: dict[str, float] = {}
    index = 0
    for segment in config.segments:
        for layer in segment.layers * segment.repeats:
            constants.update(family_of(config).constants(config, layer, index))
            index += 1
    return constants
