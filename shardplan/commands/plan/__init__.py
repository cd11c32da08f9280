"""`shardplan plan`, and the commands that compare plans: `plan diff` and `--rank_slices`."""
