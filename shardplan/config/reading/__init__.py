"""Reads the values of a configuration: from YAML files, from Python, and what is refused in both."""
