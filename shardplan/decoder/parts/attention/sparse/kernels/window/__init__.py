"""The window branch by Pallas kernels."""
