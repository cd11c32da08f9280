"""The workload of a Plan: what one step computes, of which kind, on how many tokens, in which element types."""
