"""Prints a Plan, the verdicts on it and comparisons with others, as tables, text and JSON."""
