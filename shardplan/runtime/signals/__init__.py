"""What asks a process to stop: Ctrl-C, SIGTERM, and the preemption of its host."""
