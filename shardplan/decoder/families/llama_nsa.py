"""Llama with Native Sparse Attention in all layers; a format of shardplan's own, because no release has one.

The file has the keys of a Llama, and `native_sparse_attention` with the settings of `NativeSparseConfig`:

    "model_type": "llama_nsa", "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 64,
    "native_sparse_attention": {"block": 32, "stride": 16, "selection_block": 64, "selected": 16, "window": 512}

Source of the attention: https://arxiv.org/abs/2502.11089.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.family import Family
from shardplan.decoder.families.common.keys import architecture, read_gated_mlp, read_heads, read_rms_norm
from shardplan.decoder.families.common.rotary_keys import read_rotary
from shardplan.decoder.families.common.rules import Rules, layer_norm_rules, mlp_rules
from shardplan.decoder.names import StoredTensor, Transposed
from shardplan.decoder.parts.attention.frequencies import unscaled
from shardplan.decoder.parts.attention.rotary import Rotary
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.parameters import SparseParameter, parameter_table
from shardplan.decoder.parts.attention.sparse_attention import SparseAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.errors import ConfigError, nearest

SETTINGS = "native_sparse_attention"
"""The key of a mapping with the settings of attention."""
GIVEN_ELSEWHERE = ("embed", "groups", "heads_per_group", "key_size", "value_size", "theta")
"""Settings that Llama's own keys give: sizes of heads, and the base of rotary embeddings."""
GATES, GATE_BIASES, OUTPUT = "gate_w", "gate_b", "o"
"""Names of parameters in `parameter_table`."""


def read(keys: ConfigKeys) -> dict[str, Any]:
    """Read the fields of an `Architecture` from a config.json.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> fields = read(ConfigKeys(read_config("nsa-125m", None), "config.json"))
    >>> sizes = fields["segments"][0].layers[0].attention.sizes
    >>> sizes.groups, sizes.heads_per_group, sizes.selection_block, sizes.selected, sizes.window
    (2, 6, 64, 16, 512)
    """
    heads, norm = read_heads(keys), read_rms_norm(keys)
    theta = keys.number("rope_theta", default=10000.0)
    # NativeSparseConfig has a base alone, so that a scaling or a partial rotation has no place in it
    if read_rotary(keys, heads.head_size) != Rotary(unscaled(theta, heads.head_size)):
        keys.refuse("rope_scaling", keys.take("rope_scaling", "rope_parameters"), "absent; give rope_theta alone")
    given = keys.take(SETTINGS)
    if not isinstance(given, Mapping):
        keys.refuse(SETTINGS, given, "a mapping with the settings of attention")
    _check_names(keys.where, given)
    try:
        sizes = NativeSparseConfig(
            embed=keys.integer("hidden_size"),
            groups=heads.kv_heads,
            heads_per_group=heads.heads // heads.kv_heads,
            key_size=heads.head_size,
            value_size=keys.integer("v_head_dim", default=heads.head_size),
            theta=theta,
            **given,
        )
    except ConfigError as error:
        raise ConfigError(f"{keys.where}: {SETTINGS}: {error}") from error
    layer = LayerConfig(SparseAttention(sizes), read_gated_mlp(keys, keys.flag("mlp_bias", default=False)), norm)
    keys.only("attention_bias", [False])
    return architecture(keys, [layer] * keys.integer("num_hidden_layers"), norm)


def layer_rules(config: Architecture, layer: LayerConfig, index: int) -> Rules:
    """Return the rules that make a layer's parameters from checkpoint tensors, by path in the layer.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("nsa-125m", None))
    >>> rules = layer_rules(config, config.segments[0].layers[0], 0)
    >>> rules["self_attn.attention.parameters['k_cmp']"].rule
    StoredTensor(name='model.layers.0.self_attn.k_cmp_proj.weight', shape=(128, 768))
    """
    at, embed = f"model.layers.{index}", config.embed
    found = {**mlp_rules(layer.dense_mlp, f"{at}.mlp", embed), **layer_norm_rules(layer, at, embed)}
    for name, parameter in parameter_table(layer.sparse_attention.sizes).items():
        found[f"self_attn.attention.parameters['{name}']"] = _rule(name, parameter, f"{at}.self_attn", embed)
    return found


def _rule(name: str, parameter: SparseParameter, at: str, embed: int) -> StoredTensor | Transposed:
    """Return the rule that makes a parameter of attention from a checkpoint tensor.

    Projections are stored as {outputs, inputs}, as in other models. Parameters of the compression are stored in their
    own shape, with a first axis for groups.
    """
    shape = tuple(axis.size for axis in parameter.axes)
    elements = 1
    for size in shape:
        elements *= size
    if name == GATE_BIASES:
        return StoredTensor(f"{at}.gate_proj.bias", (elements,))
    if name == OUTPUT:
        return Transposed(StoredTensor(f"{at}.o_proj.weight", (embed, elements // embed)), (1, 0))
    if name.startswith("phi_"):
        _, kind, part = name.split("_")
        return StoredTensor(f"{at}.{kind}_compression.{part}", shape)
    stored = "gate_proj" if name == GATES else f"{name}_proj"
    return Transposed(StoredTensor(f"{at}.{stored}.weight", (elements // embed, embed)), (1, 0))


def _check_names(where: str, given: Mapping[str, Any]) -> None:
    """Check that the settings of attention have known names and suitable types, and that none is missing.

    Raises:
        ConfigError: a name is unknown or missing, or a type does not fit.
    """
    settings = {field.name: field for field in fields(NativeSparseConfig) if field.name not in GIVEN_ELSEWHERE}
    for name, value in given.items():
        if name not in settings:
            raise ConfigError(f"{where}: {SETTINGS} has no key {name!r}; {nearest(str(name), settings)}")
        is_word = settings[name].name in ("compression", "compressed_rope")
        is_null = value is None and settings[name].default is None
        if not is_null and type(value) is not (str if is_word else int):
            raise ConfigError(
                f"{where}: {SETTINGS}.{name} is {value!r}; it must be {'a word' if is_word else 'an integer'}"
            )
    missing = [name for name, field in settings.items() if field.default is MISSING and name not in given]
    if missing:
        raise ConfigError(f"{where}: {SETTINGS} lacks {', '.join(missing)}; add them")


FAMILY = Family(read, layer_rules)
