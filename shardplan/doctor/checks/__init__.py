"""The checks of a host: one module for each concern, whose function `check` yields findings."""
