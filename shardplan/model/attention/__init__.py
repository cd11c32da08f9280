"""How models call attention, and with which masks."""
