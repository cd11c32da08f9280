"""Asks the installed Levanter's own parser for its verdict on a configuration file, in a separate process."""
