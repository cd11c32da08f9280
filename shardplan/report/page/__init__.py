"""The page of a plan: one HTML file with everything that is known about the plan."""
