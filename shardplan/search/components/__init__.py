"""The choices for each component of logical axes and for activations, and their costs."""
