"""Reads the values of a configuration from YAML files and from Python, and refuses what neither may contain."""
