"""What is chosen of components of logical axes and of activations, and what it costs."""
