"""Checks the configurations that public functions take."""

from typing import Any

from shardplan.config.plan_config import PlanConfig
from shardplan.errors import check_argument


def check_config(function: str, config: Any) -> None:
    """Check that an argument of a public function is a configuration.

    Raises:
        ConfigError: the argument is a file name, a mapping, a plan, or anything else.
    """
    check_argument(
        function, "config", config, PlanConfig, "a configuration, such as shardplan.load_config('configs/8b.yaml')"
    )
