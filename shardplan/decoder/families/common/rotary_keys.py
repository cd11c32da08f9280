"""Reads the rotary embeddings of a config.json, for all layers or for one kind of layers.

`shardplan.model.huggingface.rope_keys` checks the values that most families have. This module reads what only some
have: LongRoPE, partial rotation, values for kinds of layers, and queries that grow with their position.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.parts.attention.frequencies import scaled, unscaled
from shardplan.decoder.parts.attention.grouped_attention import QueryTemperature
from shardplan.decoder.parts.attention.rotary import Rotary
from shardplan.errors import ConfigError
from shardplan.model.huggingface.rope_keys import read_rope

TEMPERATURE = "llama_4_scaling_beta"
"""Key of `beta`, the factor by which queries grow with their position (`QueryTemperature`)."""
ALPHA = "alpha"
"""Key of a fixed growth of the rotary base; with it, the type `dynamic` has no other effect."""
LONGROPE = ("longrope", "su")
"""Names of LongRoPE, in which each frequency has one factor for short and another for long texts."""
KNOWN = frozenset(
    {
        ALPHA, "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor",
        TEMPERATURE, "long_factor", "low_freq_factor", "max_position_embeddings", "mscale",
        "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type",
        "short_factor", "truncate", "type",
    }
)  # fmt: skip
"""Keys of `rope_scaling` and `rope_parameters` that the decoder understands."""


def read_rotary(
    keys: ConfigKeys,
    head_size: int,
    theta: float = 10000.0,
    *,
    partial: float | None = None,
    layer_type: str | None = None,
    theta_keys: tuple[str, ...] = ("rope_theta",),
    is_scaled: bool = True,
    has_temperature: bool = False,
    has_alpha: bool = False,
) -> Rotary:
    """Read the rotary embeddings of heads of `head_size` channels.

    >>> keys = ConfigKeys({"model_type": "llama", "rope_theta": 500000.0}, "config.json")
    >>> [round(each, 6) for each in read_rotary(keys, head_size=4).frequencies.short]
    [1.0, 0.001414]

    Args:
        theta: default base of the frequencies.
        partial: default fraction of a head's channels that is rotated; None if the family always rotates all.
        layer_type: kind of layers to read, if `rope_parameters` has values for each kind.
        theta_keys: names of the base at the top level of the file; empty if that base is for other layers.
        is_scaled: whether a scaling that the file has only once holds for these layers too.
        has_temperature: whether the family reads `llama_4_scaling_beta` (`read_temperature`).
        has_alpha: whether the family reads `alpha`, by which the base becomes base * alpha ** (d / (d - 2)), for d
            channels.

    Raises:
        ConfigError: the decoder does not support the rotary embeddings, or a value is missing or wrong.
    """
    values = _values(keys, layer_type, is_scaled)
    base = keys.number(*theta_keys, default=theta) if theta_keys else theta
    if values.get("rope_theta") is not None:
        base = _checked(keys, "rope_theta", values["rope_theta"])
    if values.get(TEMPERATURE) and not has_temperature:
        keys.refuse(TEMPERATURE, values[TEMPERATURE], "0, for queries of this family do not grow with their position")
    part = keys.number("partial_rotary_factor", "rotary_pct", default=partial or 1.0)
    if values.get("partial_rotary_factor") is not None:
        part = _checked(keys, "partial_rotary_factor", values["partial_rotary_factor"])
    if partial is None and part != 1.0:
        keys.refuse("partial_rotary_factor", part, "1, for this family rotates whole heads")
    if head_size % 2 and part == 1.0:
        keys.refuse("head_dim", head_size, "an even number, for rotary embeddings")
    channels = int(head_size * part)  # rounded down, as in transformers
    if part > 1 or channels < 2 or channels % 2:
        keys.refuse("partial_rotary_factor", part, f"a part of the {head_size} channels of a head, an even number")
    if values.get(ALPHA):
        kind = values.get("rope_type") or values.get("type")
        if not has_alpha or kind != "dynamic" or channels < 4:
            keys.refuse(ALPHA, values[ALPHA], f"absent, for a {keys.values['model_type']!r} with the type {kind!r}")
        return Rotary(unscaled(base * _checked(keys, ALPHA, values[ALPHA]) ** (channels / (channels - 2)), channels))
    return Rotary(scaled(base, channels, _scaling(keys, values, channels // 2)))


def require_rope(keys: ConfigKeys) -> None:
    """Check that a config.json describes its rotary embeddings, for families that scale them by default.

    >>> require_rope(ConfigKeys({"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "config.json"))
    >>> require_rope(ConfigKeys({}, "config.json"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: config.json: rope_parameters is missing; it must be given: a default that scales ...

    Raises:
        ConfigError: neither `rope_scaling` nor `rope_parameters` is given.
    """
    if not keys.take("rope_scaling", "rope_parameters"):
        keys.refuse("rope_parameters", None, "given: a default that scales rotary embeddings is not assumed")


def read_rotated_layers(keys: ConfigKeys) -> list[bool]:
    """Read which layers have rotary embeddings; by default three of four.

    >>> read_rotated_layers(ConfigKeys({"num_hidden_layers": 5}, "config.json"))
    [True, True, True, False, True]

    Raises:
        ConfigError: `no_rope_layers` is not a list with a 1 (rotary embeddings) or a 0 (none) for each layer.
    """
    count, period = keys.integer("num_hidden_layers"), keys.integer("no_rope_layer_interval", default=4)
    default = [int((i + 1) % period != 0) for i in range(count)]
    given = keys.take("no_rope_layers") or default  # releases of Llama 4 leave the list empty
    if not isinstance(given, list) or len(given) != count or not all(each in (0, 1) for each in given):
        keys.refuse("no_rope_layers", given, f"a list of {count} times 1, for rotary embeddings, or 0")
    return [bool(each) for each in given]


def read_temperature(keys: ConfigKeys) -> QueryTemperature | None:
    """Read how queries grow with their position; None if they do not grow.

    >>> scaling = {"rope_type": "yarn", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
    >>> read_temperature(ConfigKeys({"rope_parameters": scaling}, "config.json"))
    QueryTemperature(beta=0.1, positions=16384, first=0)
    """
    values = _values(keys, None, True)
    beta = values.get(TEMPERATURE)
    if not beta:
        return None
    positions = values.get("original_max_position_embeddings")
    return QueryTemperature(
        _checked(keys, TEMPERATURE, beta),
        int(_checked(keys, "original_max_position_embeddings", positions)),
    )


def read_score_factor(keys: ConfigKeys) -> float:
    """Read the factor by which YaRN changes the scale of scores: the square of its magnitude.

    The magnitude is 0.1 * mscale_all_dim * ln(factor) + 1, and 1 where `mscale_all_dim` is not given. Source:
    DeepSeek's attention.

    >>> scaling = {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}
    >>> round(read_score_factor(ConfigKeys({"rope_scaling": scaling}, "config.json")), 4)
    1.8739
    """
    values = _values(keys, None, True)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default" or not values.get("mscale_all_dim"):
        return 1.0
    factor, mscale = (_checked(keys, name, values.get(name)) for name in ("factor", "mscale_all_dim"))
    return 1.0 if factor <= 1 else (0.1 * mscale * math.log(factor) + 1.0) ** 2


def _values(keys: ConfigKeys, layer_type: str | None, is_scaled: bool) -> Mapping[str, Any]:
    """Return the values of `rope_scaling` or `rope_parameters` for one kind of layers."""
    values = keys.take("rope_scaling") or keys.take("rope_parameters") or {}
    keys.take("rope_parameters")  # as in transformers, rope_scaling wins
    if not isinstance(values, Mapping):
        keys.refuse("rope_parameters", values, "a mapping")
    if any(isinstance(value, Mapping) for value in values.values()):
        if layer_type is None:
            keys.refuse("rope_parameters", values, "the same for all layers")
        values = values.get(layer_type) or {}
    elif not is_scaled:
        values = {"rope_theta": values.get("rope_theta")}
    unknown = sorted(set(values) - KNOWN)
    if unknown:
        raise ConfigError(
            f"{keys.where}: the rotary embeddings have a key {unknown[0]!r} ({values[unknown[0]]!r}), which the "
            "decoder does not know; remove it if it changes nothing"
        )
    return values


def _scaling(keys: ConfigKeys, values: Mapping[str, Any], pairs: int) -> dict[str, Any] | None:
    """Return the scaling of the frequencies with all its values; None if they are not scaled."""
    positions = keys.take("max_position_embeddings")
    original = keys.take("original_max_position_embeddings")
    # read by `read_rotary` and `read_temperature`; `read_rope` would refuse some of them
    own = ("rope_theta", "partial_rotary_factor", TEMPERATURE, ALPHA)
    scaling = {name: value for name, value in values.items() if name not in own}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in LONGROPE or (kind == "yarn" and "long_factor" in scaling):  # the first Phi-3 called it yarn
        return _longrope(keys, scaling, positions, original, pairs)
    config = {
        "model_type": keys.values["model_type"],
        "rope_scaling": scaling,
        "max_position_embeddings": positions,
        "original_max_position_embeddings": original,
    }
    normalized: dict[str, Any] | None = read_rope(config, keys.where)["rope_scaling"]
    return normalized


def _longrope(
    keys: ConfigKeys, scaling: Mapping[str, Any], positions: Any, original: Any, pairs: int
) -> dict[str, Any]:
    """Return the values of LongRoPE; default magnitude = sqrt(1 + ln(factor) / ln(original positions))."""
    name = "original_max_position_embeddings"
    original = _checked(keys, name, scaling.get(name) if original is None else original)
    factor = scaling.get("factor")
    if factor is None:
        factor = _checked(keys, "max_position_embeddings", positions) / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = {each: scaling.get(each) for each in ("short_factor", "long_factor")}
    for each, values in factors.items():
        if not isinstance(values, list) or len(values) != pairs:
            keys.refuse(each, values, f"a list of {pairs} numbers, one for each pair of channels")
        for value in values:
            _checked(keys, each, value)
    return {"rope_type": "longrope", **factors, name: int(original), "attention_factor": float(magnitude)}


def _checked(keys: ConfigKeys, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        keys.refuse(name, value, "a positive number")
    return float(value)
