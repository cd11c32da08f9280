"""`shardplan plan` and what compares plans: its command line, `plan diff`, and `--rank_slices`."""
