"""Questions to the planner: why not another choice, and what if a setting were different."""
