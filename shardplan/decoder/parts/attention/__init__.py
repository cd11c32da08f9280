"""Attention of a decoder's layers, and the positions by which it rotates queries and keys."""
