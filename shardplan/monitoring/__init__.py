"""What a run with devices records of itself, and how it notices that it is not as planned."""
