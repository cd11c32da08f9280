"""Loading rules of latent attention under the names of DeepSeek's tensors, which rotate neighbouring channels.

A checkpoint has the rotated channels last in each head, beside the latent of keys and values in one projection, and the
unrotated channels of keys beside those of values in another. The decoder has the rotated ones first, in halves, and a
projection for each: `shardplan.decoder.parts.attention.latent_attention`.
"""

from shardplan.decoder.families.common.rules import Rules, linear_rules, pairs_to_halves
from shardplan.decoder.names import Concatenated, Reshaped, Rule, Shape, Sliced, StoredTensor
from shardplan.decoder.parts.attention.latent_attention import LatentAttention


def latent_attention_rules(attention: LatentAttention, name: str, embed: int) -> Rules:
    """Return the loading rules of the projections and norms of latent attention.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("moonlight-16b", None))
    >>> rules = latent_attention_rules(config.segments[0].layers[0].attention, "self_attn", config.embed)
    >>> keys, values = rules["self_attn.k_proj.weight"], rules["self_attn.v_proj.weight"]
    >>> keys.rule.rule.name, (keys.start, keys.stop), (values.start, values.stop)
    ('self_attn.kv_b_proj.weight', (0, 128), (128, 256))

    Args:
        name: prefix of the attention.
    """
    heads, unrotated, rank = attention.heads, attention.unrotated_size, attention.kv_rank
    found: Rules = {}
    inputs = embed
    if attention.query_rank is not None:
        inputs = attention.query_rank
        found |= linear_rules("self_attn.q_a_proj", f"{name}.q_a_proj", inputs, embed, attention.has_bias)
        found["self_attn.q_a_norm.weight"] = StoredTensor(f"{name}.q_a_layernorm.weight", (inputs,))
    queries = f"{name}.{'q_proj' if attention.query_rank is None else 'q_b_proj'}.weight"
    found["self_attn.q_proj.weight"] = _rotated_first(queries, attention, inputs)
    found |= _latent_and_rotated(f"{name}.kv_a_proj_with_mqa", "weight", attention, (embed,))
    if attention.has_bias:
        found |= _latent_and_rotated(f"{name}.kv_a_proj_with_mqa", "bias", attention, ())
    found["self_attn.kv_a_norm.weight"] = StoredTensor(f"{name}.kv_a_layernorm.weight", (rank,))
    size = unrotated + attention.value_size
    both = Reshaped(StoredTensor(f"{name}.kv_b_proj.weight", (heads * size, rank)), (heads, size, rank))
    found["self_attn.k_proj.weight"] = Sliced(both, 1, 0, unrotated)
    found["self_attn.v_proj.weight"] = Sliced(both, 1, unrotated, size)
    outputs = heads * attention.value_size
    return found | linear_rules("self_attn.o_proj", f"{name}.o_proj", embed, outputs, attention.has_output_bias)


def _rotated_first(name: str, attention: LatentAttention, inputs: int) -> Rule:
    """Return the rule for queries {heads, head_size, inputs} that moves rotated channels to the front of each head."""
    heads, size, unrotated = attention.heads, attention.head_size, attention.unrotated_size
    by_head = Reshaped(StoredTensor(name, (heads * size, inputs)), (heads, size, inputs))
    rotated = pairs_to_halves(Sliced(by_head, 1, unrotated, size), (heads, attention.rotated_size, inputs))
    return Concatenated((rotated, Sliced(by_head, 1, 0, unrotated)), 1)


def _latent_and_rotated(name: str, kind: str, attention: LatentAttention, inputs: Shape) -> Rules:
    """Return the loading rules of the projections to the key-value latent, and to the rotated channels of keys."""
    rank, rotated = attention.kv_rank, attention.rotated_size
    both = StoredTensor(f"{name}.{kind}", (rank + rotated, *inputs))
    pairs = Sliced(both, 0, rank, rank + rotated)
    return {
        f"self_attn.kv_a_proj.{kind}": Sliced(both, 0, 0, rank),
        f"self_attn.k_rotated_proj.{kind}": pairs_to_halves(pairs, (1, rotated, *inputs)),
    }
