"""Read and check the contents of a checkpoint: safetensors headers, the index of its files, and their integrity."""
