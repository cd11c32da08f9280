"""Texts of an evaluation: their files, and their tokens."""
