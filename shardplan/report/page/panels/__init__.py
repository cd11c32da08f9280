"""The panels of a plan's page: each module turns a Plan and verdicts into the data of one panel's template."""
