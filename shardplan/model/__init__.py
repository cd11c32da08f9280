"""Builds a Levanter model from a Hugging Face config.json, and reads its logical axes."""
