"""Derives other steps from one trace: with other gradient checkpointing, and with other batches."""
