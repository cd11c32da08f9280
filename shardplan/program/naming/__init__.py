"""Logical axes of the results of JAX primitives: one table of primitives, and the rules that its rows name."""
