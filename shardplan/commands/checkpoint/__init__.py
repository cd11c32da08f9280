"""`shardplan checkpoint`: the schedule of a load, what a checkpoint is, and the conversion of one."""
