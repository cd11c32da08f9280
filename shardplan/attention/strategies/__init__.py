"""Strategies of sequence parallelism: all-gather of keys and values, a ring, or all-to-alls of heads (Ulysses)."""
