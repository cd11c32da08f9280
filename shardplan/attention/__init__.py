"""Attention over sequences that are cut over devices: all-gather, ring, Ulysses and their hybrid."""
