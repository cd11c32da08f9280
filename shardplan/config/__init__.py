"""Configurations: shared sections, the keys of each command, YAML files and command-line arguments. Imports no JAX."""

from shardplan.config.load import load_config, parse_config
from shardplan.config.plan_config import PlanConfig

__all__ = ["PlanConfig", "load_config", "parse_config"]
