"""The hub of a run: a process of its own that all processes of the run are connected to, and what they exchange."""
