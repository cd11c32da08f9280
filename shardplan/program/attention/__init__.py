"""Attention in a traced program: the kinds of its calls, and what its kernels keep and recomputed calls leave out."""
