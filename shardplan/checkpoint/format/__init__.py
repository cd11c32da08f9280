"""What is in a checkpoint: safetensors headers, the index of its files, and their integrity."""
