"""Views of a Plan: tables for a terminal, YAML for a Levanter trainer."""

from shardplan.report.levanter import trainer_yaml
from shardplan.report.tables import console, print_plan, print_results

__all__ = ["console", "print_plan", "print_results", "trainer_yaml"]
