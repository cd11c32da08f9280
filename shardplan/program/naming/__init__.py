"""Logical axes of the results of JAX primitives: a table of primitives, and the rules that its rows name."""
