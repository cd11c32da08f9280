"""Functions that families share: readers of config.json keys, and rules that make parameters from tensors."""
