"""Watches this process: what it is doing, where it is stuck, and how it ends when it cannot go on."""
