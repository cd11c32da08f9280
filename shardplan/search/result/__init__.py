"""Converts the assignment that a search finds to its Plan: figures, details, and compiler options."""
