"""Views of a Plan and of its verdict: tables for a terminal, YAML for a Levanter trainer."""

from shardplan.report.difference import print_difference
from shardplan.report.explain import print_what_if, print_why
from shardplan.report.levanter import trainer_yaml
from shardplan.report.lint import print_review, review_json
from shardplan.report.tables import console, print_plan, print_results
from shardplan.report.verdicts import print_ranking, print_verdict

__all__ = [
    "console",
    "print_difference",
    "print_plan",
    "print_ranking",
    "print_results",
    "print_review",
    "print_verdict",
    "print_what_if",
    "print_why",
    "review_json",
    "trainer_yaml",
]
