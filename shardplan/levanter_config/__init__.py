"""Levanter's configuration files, read and written: every version of the schema. Imports no JAX."""
