"""Computes losses and scores of next tokens from logits, in blocks of positions."""
