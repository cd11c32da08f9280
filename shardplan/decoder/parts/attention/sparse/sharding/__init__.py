"""Native Sparse Attention on a mesh: shards of parameters and of positions, what devices exchange, and its bytes."""
