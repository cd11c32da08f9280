"""How devices share attention: all-gather of keys and values, a ring, or all-to-alls of heads (Ulysses)."""
