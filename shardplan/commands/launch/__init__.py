"""`launch` and `launch train`, and what they share."""
