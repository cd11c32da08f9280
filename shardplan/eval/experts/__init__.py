"""Statistics of the routed experts of an evaluation: the records of its steps, their files, and their summary."""
