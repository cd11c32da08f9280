"""`launch` and `launch train`, and the code that they share."""
