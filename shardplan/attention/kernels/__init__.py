"""Kernels that compute attention on one device: block by block in XLA, or by the splash kernel of TPUs."""
