"""Calls that a trace keeps as one operation: attention, sparse attention, and blocks of routed experts."""
