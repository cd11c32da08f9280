"""One compile by the TPU compiler, in a separate process on a machine without a TPU, and its result."""
