"""The task that measures the loss of texts."""
