"""Weights that are stored as codes and scales rather than plain floating-point values."""
