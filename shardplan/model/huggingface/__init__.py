"""Reads the config.json of a Hugging Face model, and checks whether the model is supported."""
