"""The page of a plan: one HTML file with all information about the plan."""
