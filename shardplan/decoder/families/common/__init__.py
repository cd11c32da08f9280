"""What families have in common: keys of a config.json, and rules of parameters."""
