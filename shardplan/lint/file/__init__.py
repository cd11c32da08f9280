"""Lints a whole Levanter file: what Levanter's parser says of it, and the model, slice and workload that it is for."""
