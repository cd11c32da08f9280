"""Records the environment, memory and time of a run, and compares its arrays, memory and speed with the plan."""
