"""Predicts which values of a traced program a TPU compiler writes to memory, and what it moves out of loops."""
