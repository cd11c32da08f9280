"""Requests to stop a process: Ctrl-C, SIGTERM, and the preemption of its host."""
