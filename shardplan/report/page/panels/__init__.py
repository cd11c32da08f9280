"""The panels of the page of a plan: each module turns a Plan and verdicts into what the template of one panel draws."""
