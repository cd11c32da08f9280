"""Map every array of the model to the elements of the stored tensors that it is made of."""
