"""Weights that are not stored as plain numbers: codes and the scales that make numbers of them."""
