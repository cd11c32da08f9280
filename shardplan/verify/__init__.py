"""Compiles plans with the TPU compiler, on a machine without a TPU, and reads what it reports."""
