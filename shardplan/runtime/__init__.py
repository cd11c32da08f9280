"""Process start-up and supervision: devices, other processes, progress, checks of output paths."""
