"""How models call attention, and which masks they give it."""
