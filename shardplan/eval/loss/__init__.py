"""The loss of texts."""
