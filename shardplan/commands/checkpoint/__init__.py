"""`shardplan checkpoint`: schedule a load, inspect a checkpoint, or convert one."""
