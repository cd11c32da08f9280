"""Configurations: shared sections, the keys of each command, YAML files and command-line arguments. Imports no JAX."""

from shardplan.config.command_flags import PlanConfig
from shardplan.config.load import load_config, parse_config

__all__ = ["PlanConfig", "load_config", "parse_config"]
