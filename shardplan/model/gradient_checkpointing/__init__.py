"""What gradient checkpointing keeps of a layer: the activations that a policy names, and selections of blocks."""
