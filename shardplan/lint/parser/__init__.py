"""The verdict of the installed Levanter's own parser on a configuration file, from a process of its own."""
