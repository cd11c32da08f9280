"""MLPs of a decoder's layers: one for all tokens, or routed experts."""
