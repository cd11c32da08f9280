"""Prints a Plan, the verdicts on it and what it is compared with, as tables, text and JSON."""
