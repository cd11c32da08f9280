"""Which elements of which stored tensors make up each array of the model."""
