"""`shardplan checkpoint`: the schedule of a load, and the conversion of a checkpoint."""
