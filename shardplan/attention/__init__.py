"""Sequence-parallel attention: all-gather, ring, Ulysses and hybrid, on named arrays and in Levanter models."""

from shardplan.attention.block_sparse import attend_to_blocks
from shardplan.attention.dot_product import dot_product_attention
from shardplan.attention.levanter import Method, with_sequence_parallel
from shardplan.attention.sequence import ShardedSequence, next_token_losses, restore_order, shard_sequence
from shardplan.model.attention.chunked_mask import with_chunks
from shardplan.positions.sequence_layout import SequenceLayout

__all__ = [
    "Method",
    "SequenceLayout",
    "ShardedSequence",
    "attend_to_blocks",
    "dot_product_attention",
    "next_token_losses",
    "restore_order",
    "shard_sequence",
    "with_chunks",
    "with_sequence_parallel",
]
