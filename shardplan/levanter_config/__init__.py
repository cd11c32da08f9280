"""Levanter's configuration files, read and written. Imports no JAX."""
