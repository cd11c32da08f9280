"""The results of evaluations: the folder that a run writes, and finished runs that are compared."""
