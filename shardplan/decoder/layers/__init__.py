"""Which layers of a decoder have experts or Native Sparse Attention, and what they record in training."""
