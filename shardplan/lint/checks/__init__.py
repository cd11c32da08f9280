"""The checks of a trainer section: each yields findings."""
