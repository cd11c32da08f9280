"""Prints plans, verdicts and their comparisons as tables on a terminal."""
