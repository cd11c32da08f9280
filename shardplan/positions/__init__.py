"""Positions of a sequence: what a mask allows between them, which of them and which heads a device has. Pure."""
