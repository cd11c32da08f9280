"""Stream Hugging Face checkpoints into sharded Levanter models."""
