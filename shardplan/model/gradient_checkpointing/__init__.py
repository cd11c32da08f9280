"""Gradient checkpointing of a layer: activations that a policy keeps by name, and selections of blocks."""
