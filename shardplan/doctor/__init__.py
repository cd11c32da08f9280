"""Checks of one host before a run is started on it: one module a concern, each in a process of its own."""
