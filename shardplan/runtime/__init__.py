"""Process start-up: devices, logging, progress, exit codes."""
