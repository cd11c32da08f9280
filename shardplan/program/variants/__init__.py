"""Other steps from one trace: of other policies of gradient checkpointing, and of other batches."""
