"""Views of a Plan and of its verdict: tables for a terminal, YAML for a Levanter trainer."""

from shardplan.report.levanter import trainer_yaml
from shardplan.report.tables import console, print_plan, print_results
from shardplan.report.verdicts import print_ranking, print_verdict

__all__ = ["console", "print_plan", "print_ranking", "print_results", "print_verdict", "trainer_yaml"]
