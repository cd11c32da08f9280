"""Keys of a config.json about latent attention, by DeepSeek's names, which other families use too."""

from dataclasses import replace
from typing import NamedTuple

from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families.common.rotary_keys import read_rotary, read_score_factor, read_temperature
from shardplan.decoder.parts.attention.latent_attention import LatentAttention
from shardplan.decoder.parts.attention.rotary import Rotary
from shardplan.decoder.parts.norm import NormConfig, NormKind

LATENT_NORM = NormConfig(NormKind.RMS, 1e-6)
"""The norms of latents, whose epsilon is not `rms_norm_eps`."""


class LatentSizes(NamedTuple):
    """Sizes of latent attention that a config.json may leave out."""

    query_rank: int
    kv_rank: int
    unrotated: int
    rotated: int
    value: int


def read_latent_attention(keys: ConfigKeys, defaults: LatentSizes) -> LatentAttention:
    """Read latent attention with rotary embeddings on `qk_rope_head_dim` channels of a head.

    >>> keys = ConfigKeys({"model_type": "deepseek_v2", "num_attention_heads": 16, "q_lora_rank": None}, "config.json")
    >>> attention = read_latent_attention(keys, LatentSizes(1536, 512, unrotated=128, rotated=64, value=128))
    >>> attention.query_rank, attention.kv_rank, attention.head_size
    (None, 512, 192)
    """
    return _read(keys, defaults, read_rotary(keys, _rotated(keys, defaults)))


def read_latent_attention_with_temperature(keys: ConfigKeys, defaults: LatentSizes) -> LatentAttention:
    """Read latent attention whose queries are scaled by position, with rotary embeddings on some channels.

    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> keys = ConfigKeys(read_config("mistral-small-4-119b", None), "config.json")
    >>> sizes = LatentSizes(query_rank=1024, kv_rank=256, unrotated=64, rotated=64, value=128)
    >>> read_latent_attention_with_temperature(keys, sizes).temperature
    QueryTemperature(beta=0.1, positions=8192, first=0)
    """
    rotated, unrotated = _rotated(keys, defaults), keys.integer("qk_nope_head_dim", default=defaults.unrotated)
    head_size = rotated + unrotated
    rotary = read_rotary(keys, head_size, partial=rotated / head_size, has_temperature=True)
    channels = 2 * rotary.frequencies.pairs
    if channels != rotated:
        keys.refuse("partial_rotary_factor", channels / head_size, f"{rotated / head_size}, as qk_rope_head_dim says")
    return replace(_read(keys, defaults, rotary), temperature=read_temperature(keys))


def _rotated(keys: ConfigKeys, defaults: LatentSizes) -> int:
    """Read the number of channels that are rotated."""
    rotated = keys.integer("qk_rope_head_dim", default=defaults.rotated)
    if rotated % 2:
        keys.refuse("qk_rope_head_dim", rotated, "an even number, for rotary embeddings")
    return rotated


def _read(keys: ConfigKeys, defaults: LatentSizes, rotary: Rotary) -> LatentAttention:
    """Read latent attention, except its rotary embeddings."""
    heads, bias = keys.integer("num_attention_heads"), keys.flag("attention_bias", default=False)
    attention = LatentAttention(
        heads=heads,
        query_rank=keys.integer_or_null("q_lora_rank", defaults.query_rank),
        kv_rank=keys.integer("kv_lora_rank", default=defaults.kv_rank),
        unrotated_size=keys.integer("qk_nope_head_dim", default=defaults.unrotated),
        value_size=keys.integer("v_head_dim", default=defaults.value),
        rotary=rotary,
        norm=LATENT_NORM,
        has_bias=bias,
        has_output_bias=bias,
    )
    # further keys that follow from these, and the order of channels, which rules undo
    keys.only("num_key_value_heads", [heads])
    keys.only("qk_head_dim", [attention.head_size])
    keys.take("head_dim")  # which transformers does not read: GLM-5.2 has one that is no size of its heads
    keys.only("rope_interleave", [True])
    return replace(attention, scale=attention.head_size**-0.5 * read_score_factor(keys))
