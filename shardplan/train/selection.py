"""Records of Native Sparse Attention in a training: each layer's method, and the selected blocks.

| where | what |
|---|---|
| audit.txt | the method of the selected branch of each layer; one that is not as planned stops the run |
| heartbeats | figures of all layers, of the last step |
| run.json | `selected_methods`: method -> numbers of layers; `selection`: the figures of the last step, by layer |
"""

import re
from collections.abc import Mapping
from typing import Any

import jax

from shardplan.decoder.layers.sparse_layers import methods_by_layer
from shardplan.decoder.model import Decoder
from shardplan.errors import ConfigError
from shardplan.plan.layer_numbers import layers_text
from shardplan.plan.plan import Plan

METHODS, SELECTION = "selected_methods", "selection"
"""Elements of run.json."""
PREFIX = "train/nsa/"
"""Prefix that Levanter's Trainer gives the metrics of `shardplan.decoder.layers.selection_metrics`."""
OF_LAYER, OF_BLOCK = re.compile(r"layer_(\d+)/(\w+)"), re.compile(r"block_(\d+)_load")


def selected_methods(model: Any, plan: Plan) -> dict[str, list[int]]:
    """Return method of the selected branch -> layers that use it; empty for models without Native Sparse Attention.

    Raises:
        ConfigError: a layer uses another method than the plan has.
    """
    methods: dict[str, list[int]] = {}
    if not isinstance(model, Decoder):
        return methods
    for number, method in methods_by_layer(model.config.segments).items():
        methods.setdefault(method.value, []).append(number)
    planned = plan.attention.sparse_kernel.value
    for name, layers in methods.items():
        if name != planned:
            raise ConfigError(
                f"not as planned: {layers_text(layers, model.config.num_layers)} attend to selected blocks by "
                f"{name}, planned is {planned}; let nothing replace model.selected_method"
            )
    return methods


def describe_methods(methods: Mapping[str, list[int]], num_layers: int) -> str:
    """Return lines on the methods that agree with the plan, for audit.txt.

    >>> describe_methods({"dense_mask": [0, 1]}, 2)
    'selected blocks of all 2 layers: dense_mask, as planned\\n'

    Args:
        methods: as `selected_methods` returns them.
        num_layers: layers of the model.
    """
    lines = []
    for method, layers in methods.items():
        lines.append(f"selected blocks of {layers_text(layers, num_layers)}: {method}, as planned\n")
    return "".join(lines)


def model_figures(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """Select, from a step's metrics, the statistics over all layers; empty if there are none."""
    names = [name.removeprefix(PREFIX) for name in metrics if name.startswith(PREFIX)]
    arrays = {name: metrics[PREFIX + name] for name in names if "/" not in name}
    return {name: float(value) for name, value in jax.device_get(arrays).items()}


def describe_selection(metrics: Mapping[str, jax.Array], step: int) -> dict[str, Any]:
    """Return the section `selection` of run.json, from the metrics of a step.

    It has the number of the step, the `figures` of all layers, the figures of each layer in `layers`, and, if there are
    few blocks, the `load` of each block.
    """
    layers: dict[int, dict[str, Any]] = {}
    for name, value in jax.device_get(dict(metrics)).items():
        found = OF_LAYER.fullmatch(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
        if found is None:
            continue
        layer = layers.setdefault(int(found[1]), {"layer": int(found[1])})
        if OF_BLOCK.fullmatch(found[2]):
            layer.setdefault("load", []).append(float(value))
        else:
            layer[found[2]] = float(value)
    return {"step": step, "figures": model_figures(metrics), "layers": [layers[number] for number in sorted(layers)]}
