"""Attention in a traced program: kinds of calls, log-sum-exps kept with contexts, unused results of recomputation."""
