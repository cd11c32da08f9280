"""Stream Hugging Face checkpoints into sharded Levanter models, and write sharded models out again."""
