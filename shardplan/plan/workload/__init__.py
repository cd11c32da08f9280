"""The workload of a Plan: what one step computes, its kind, on how many tokens, in which element types."""
