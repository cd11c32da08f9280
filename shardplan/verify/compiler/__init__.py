"""One compile by the TPU compiler, in a process of its own on a machine without a TPU, and its result."""
