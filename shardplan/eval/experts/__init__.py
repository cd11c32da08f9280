"""Statistics of routed experts of an evaluation: what its steps record, its files, and its summary."""
