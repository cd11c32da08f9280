"""Keys of the indexer of DeepSeek's sparse attention, which chooses the positions that each query attends to.

It chooses `index_topk` of them. In a text of no more positions it chooses all, so that attention is computed without
it; longer texts are refused. Source: https://arxiv.org/abs/2512.02556.
"""

from typing import Any

from shardplan.decoder.config_keys import ConfigKeys

INDEXER_TENSORS = (".self_attn.indexer.",)
"""Parts of the names of the indexer's tensors."""
LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")
"""Names of layers with an indexer, in transformers 5.24 and 5.12."""
UNREAD = (
    "index_head_dim", "index_n_heads", "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "indexer_types",
)  # fmt: skip
"""Keys of the indexer that have no effect if it chooses all positions."""


def read_indexer(keys: ConfigKeys, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Architecture`, limited to as many positions as the indexer chooses for a query.

    >>> read_indexer(ConfigKeys({"index_topk": 2048}, "config.json"), {"max_seq_len": 163840})
    {'max_seq_len': 2048, 'index_topk': 2048}

    Args:
        fields: the fields without an indexer.
    """
    keys.take(*UNREAD)
    kinds = keys.take("layer_types")
    if kinds is not None and kinds not in [[kind] * keys.integer("num_hidden_layers") for kind in LAYER_TYPES]:
        keys.refuse("layer_types", kinds, f"{LAYER_TYPES[0]} for every layer")
    chosen = keys.integer("index_topk", default=2048)
    return {**fields, "index_topk": chosen, "max_seq_len": min(fields["max_seq_len"], chosen)}
