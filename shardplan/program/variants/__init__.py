"""Derives other steps from one trace: with other gradient checkpointing, or with another batch."""
