"""The branches of Native Sparse Attention, as functions of arrays: compressed and selected blocks, and the window."""
