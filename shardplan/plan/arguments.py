"""Checks the plans that public functions take."""

from typing import Any

from shardplan.errors import check_argument
from shardplan.plan.plan import Plan


def check_plan(function: str, plan: Any) -> None:
    """Check that an argument of a public function is a plan.

    >>> check_plan("save_orbax", "plan.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: save_orbax: plan is 'plan.json'; pass a plan, from shardplan.make_plan(config) or ...

    Raises:
        ConfigError: the argument is a file name, a configuration, or anything else.
    """
    check_argument(
        function, "plan", plan, Plan, "a plan, from shardplan.make_plan(config) or shardplan.Plan.load('plan.json')"
    )
