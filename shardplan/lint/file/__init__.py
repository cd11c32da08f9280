"""Lints a complete Levanter file: the errors of Levanter's parser, and the file's model, slice and workload."""
