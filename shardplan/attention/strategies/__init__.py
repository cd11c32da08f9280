"""How devices share attention: keys gathered, passed around a ring, or heads exchanged for positions."""
