"""Pallas kernels for TPUs of the branches of Native Sparse Attention; on other devices JAX's interpreter runs them."""
