"""The cost of Native Sparse Attention on one device: its stages, transfers and memory."""
