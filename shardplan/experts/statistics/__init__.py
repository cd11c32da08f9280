"""Statistics of routed experts: the records of a forward pass, and the figures computed from them."""
