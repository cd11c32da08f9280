"""A plan as one HTML file: each module turns a Plan and verdicts into what the template of one panel draws."""
