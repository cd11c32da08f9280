"""What is computed of logits: the loss of the next token, scores, and both in blocks of positions."""
