"""Views of a Plan and of its verdict: tables for a terminal, YAML for a Levanter trainer."""
