"""The hub of a run: a separate process to which all processes of the run connect, and their exchanges through it."""
