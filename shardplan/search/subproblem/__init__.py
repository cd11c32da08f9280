"""One mesh with the mapping of batch and positions: the fastest choice for every component of logical axes."""
