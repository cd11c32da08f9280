"""What one device computes attention with: XLA block by block, or the splash kernel of TPUs."""
