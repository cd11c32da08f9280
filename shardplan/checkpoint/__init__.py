"""Stream Hugging Face checkpoints into sharded Levanter models."""

from shardplan.checkpoint.best_effort import best_effort_sharding
from shardplan.checkpoint.load import HFCheckpointConverter, load_pretrained, stream_model

__all__ = ["HFCheckpointConverter", "best_effort_sharding", "load_pretrained", "stream_model"]
