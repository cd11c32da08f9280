"""`shardplan eval`, the comparison of its results, and lm_eval with models of shardplan."""
