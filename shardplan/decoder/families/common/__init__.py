"""Functions that families share: readers of config.json keys, and rules of parameters."""
