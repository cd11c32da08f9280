"""Sequence positions: what a mask allows between them, and which positions and heads each device holds. Pure."""
