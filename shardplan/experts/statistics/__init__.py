"""Statistics of routed experts: what a forward pass records, and the figures that it gives."""
