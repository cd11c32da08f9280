"""Reads the keys of a config.json that many families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.parts.attention.grouped_attention import GroupedAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.mlp.mlp import MlpConfig
from shardplan.decoder.parts.norm import NormConfig, NormKind
from shardplan.decoder.parts.segments import divide_layers

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Name of an activation in a config.json -> its name in `shardplan.decoder.parts.mlp.mlp`."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`: without and with a window."""
WINDOW_PERIOD = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys for a number n: every n-th layer has no window; transformers 4.53 wrote the second key."""


def read_heads(keys: ConfigKeys, head_size: int | None = None, kv_heads: int | None = None) -> GroupedAttention:
    """Read the number and the size of attention heads; the caller adds biases and rotary embeddings.

    >>> keys = ConfigKeys({"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}, "config.json")
    >>> attention = read_heads(keys)
    >>> attention.heads, attention.kv_heads, attention.head_size
    (8, 2, 8)

    Args:
        head_size: default of `head_dim`; None for hidden_size / num_attention_heads.
        kv_heads: default of `num_key_value_heads`; None for num_attention_heads.
    """
    heads, embed = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    groups = keys.integer("num_key_value_heads", default=kv_heads or heads)
    if heads % groups:
        keys.refuse("num_key_value_heads", groups, f"a divisor of num_attention_heads, {heads}")
    if head_size is not None and keys.is_null("head_dim"):
        keys.refuse("head_dim", None, "a number, which does not follow from hidden_size in this family")
    if keys.take("head_dim") is None and head_size is None and embed % heads:
        keys.refuse("num_attention_heads", heads, f"a divisor of hidden_size, {embed}")
    return GroupedAttention(heads, groups, keys.integer("head_dim", default=head_size or embed // heads))


def read_attention(keys: ConfigKeys, head_size: int | None = None, kv_heads: int | None = None) -> GroupedAttention:
    """Read attention heads as `read_heads` does, and whether all projections have biases.

    >>> keys = ConfigKeys({"hidden_size": 64, "num_attention_heads": 8, "attention_bias": True}, "config.json")
    >>> read_attention(keys).has_bias
    True
    """
    bias = keys.flag("attention_bias", default=False)
    return replace(read_heads(keys, head_size, kv_heads), has_bias=bias, has_output_bias=bias)


def read_gated_mlp(keys: ConfigKeys, has_bias: bool = False) -> MlpConfig:
    """Read the size and the activation of a gated MLP.

    >>> keys = ConfigKeys({"hidden_act": "silu", "intermediate_size": 128}, "config.json")
    >>> read_gated_mlp(keys)
    MlpConfig(size=128, activation='silu', has_bias=False, is_gated=True, axis='mlp')
    """
    activation = keys.choice("hidden_act", choices=ACTIVATIONS, default="silu")
    return MlpConfig(keys.integer("intermediate_size"), activation, has_bias, is_gated=True)


def read_rms_norm(keys: ConfigKeys, epsilon: float = 1e-6, is_around_one: bool = False) -> NormConfig:
    """Read the settings of RMS norms.

    >>> read_rms_norm(ConfigKeys({"rms_norm_eps": 1e-5}, "config.json")).epsilon
    1e-05

    Args:
        epsilon: default of `rms_norm_eps`.
    """
    return NormConfig(NormKind.RMS, keys.number("rms_norm_eps", default=epsilon), is_around_one=is_around_one)


def read_windows(keys: ConfigKeys, is_full: Callable[[int], bool], window: int | None = None) -> list[int | None]:
    """Read the window of every layer; None for a layer that attends to all earlier positions.

    >>> keys = ConfigKeys({"num_hidden_layers": 4, "sliding_window": 128}, "config.json")
    >>> read_windows(keys, every(4))
    [128, 128, 128, None]

    Args:
        is_full: index of a layer -> whether the layer has no window; used if `layer_types` is absent.
        window: default of `sliding_window`.
    """
    layers, size = keys.integer("num_hidden_layers"), keys.integer_or_null("sliding_window", window)
    kinds = keys.take("layer_types")
    if kinds is None:
        kinds = [FULL if is_full(i) else SLIDING for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        keys.refuse("layer_types", kinds, f"a list of {layers} times {FULL} or {SLIDING}")
    if SLIDING in kinds and size is None:
        keys.refuse("sliding_window", None, f"a number of tokens, for the layers with {SLIDING}")
    return [size if kind == SLIDING else None for kind in kinds]


def read_uniform_window(keys: ConfigKeys, window: int | None) -> int | None:
    """Read the window that all layers share; None if they attend to all earlier positions.

    >>> read_uniform_window(ConfigKeys({"num_hidden_layers": 2, "sliding_window": 4096}, "config.json"), None)
    4096

    Args:
        window: default of `sliding_window`.
    """
    size, kinds = keys.integer_or_null("sliding_window", window), keys.take("layer_types")
    expected = [FULL if size is None else SLIDING] * keys.integer("num_hidden_layers")
    if kinds is not None and kinds != expected:
        keys.refuse("layer_types", kinds, f"{len(expected)} times {expected[0]}, as sliding_window is {size}")
    return size


def with_windows(layer: LayerConfig, windows: Sequence[int | None]) -> list[LayerConfig]:
    """Return a copy of a layer for each window.

    >>> keys = ConfigKeys({"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128}, "config.json")
    >>> layer = LayerConfig(read_heads(keys), read_gated_mlp(keys), read_rms_norm(keys))
    >>> [each.attention.window for each in with_windows(layer, [128, 128, None])]
    [128, 128, None]
    """
    return [replace(layer, attention=replace(layer.grouped_attention, window=window)) for window in windows]


def every(period: int) -> Callable[[int], bool]:
    """Return a function (layer) -> whether the layer is the last one of its period.

    >>> list(map(every(4), range(5)))
    [False, False, False, True, False]
    """
    return lambda layer: (layer + 1) % period == 0


def architecture(
    keys: ConfigKeys,
    layers: Sequence[LayerConfig],
    norm: NormConfig | None,
    *,
    is_tied: bool = False,
    positions: int = 2048,
    **more: Any,
) -> dict[str, Any]:
    """Return the fields of an `Architecture`, read from keys that nearly all families have.

    >>> keys = ConfigKeys({"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128}, "config.json")
    >>> layer = LayerConfig(read_heads(keys), read_gated_mlp(keys), read_rms_norm(keys))
    >>> fields = architecture(keys, [layer] * 2, layer.norm, positions=4096)
    >>> fields["max_seq_len"], fields["embed"], fields["segments"][0].repeats, fields["is_tied"]
    (4096, 64, 2, False)

    Args:
        is_tied: default of `tie_word_embeddings`.
        positions: default of `max_position_embeddings`.
        more: further fields.
    """
    if keys.is_null("max_position_embeddings"):
        keys.refuse("max_position_embeddings", None, "a positive integer")
    return {
        "max_seq_len": keys.integer("max_position_embeddings", default=positions),
        "embed": keys.integer("hidden_size"),
        "segments": divide_layers(layers),
        "norm": norm,
        "is_tied": keys.flag("tie_word_embeddings", default=is_tied),
        **more,
    }


def only(keys: ConfigKeys, values: Mapping[str, Any]) -> None:
    """Check that every key is absent, null, or the one value that the decoder supports.

    >>> only(ConfigKeys({"pretraining_tp": 1}, "config.json"), {"pretraining_tp": 1})
    >>> only(ConfigKeys({"pretraining_tp": 2}, "config.json"), {"pretraining_tp": 1})
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: config.json: pretraining_tp is 2; it must be 1
    """
    for name, value in values.items():
        keys.only(name, [value])
