"""Quantized weights, which are stored as codes and scales."""
