"""The choices of each component of logical axes and of activations, and their costs."""
