"""Pallas kernels of the branches of Native Sparse Attention, for TPUs; JAX's interpreter runs them on other devices."""
