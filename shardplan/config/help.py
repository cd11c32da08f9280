"""Makes the argument parser of a command, whose help lists the command's own keys by section."""

import argparse
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NoReturn

from shardplan.config.keys import Key
from shardplan.config.plan_config import PlanConfig
from shardplan.errors import ConfigError

LOGGING_FLAGS = {"quiet": "log errors only, and show no progress", "verbose": "log what the libraries log, too"}
"""Flags that every command accepts."""
CONFIG_FLAG = "a YAML file of keys; of several, later ones win"
MODEL_FLAG = "a checkpoint (model.ref), or a config.json or bundled model to plan (model.config)"
"""Help of `--config` and `--model`, the two flags that are not keys."""
REF_ARGUMENT = "the checkpoint (model.ref)"
WITHOUT_CONFIGURATION = {
    "plan diff": "Print what differs between two Plan files.",
    "eval compare": "Print the losses or the extraction of several models side by side.",
    "lm_eval": "Run the command line of lm-evaluation-harness, with the model shardplan.",
    "models": "Print which models are supported, or the facts of one.",
}
"""Commands that take arguments instead of keys -> the purpose of each."""
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL", tuple: "TEXT"}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise an error that says what is wrong with the arguments.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"command line: {message.removeprefix('argument ')}")


def make_parser(command: str, **settings: Any) -> Parser:
    """Make a parser of `shardplan COMMAND`, with the flags that every command has."""

    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.HelpFormatter(prog, max_help_position=34, width=118)

    parser = Parser(prog=f"shardplan {command}", formatter_class=formatter, allow_abbrev=False, **settings)
    for name, text in LOGGING_FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", default=None, help=text)
    return parser


def add_keys(parser: argparse.ArgumentParser, cls: type[PlanConfig], keys: Mapping[str, Key]) -> None:
    """Add the keys of the configuration `cls` in groups, one per section."""
    parser.description = " ".join((cls.__doc__ or "").split())
    parser.usage = f"{parser.prog} [--config FILE] [--KEY VALUE ...]"
    if cls.takes_ref:
        parser.usage += " REF"
        parser.add_argument("ref", metavar="REF", nargs="?", help=REF_ARGUMENT)
    add_config(parser)
    parser.add_argument("--model", metavar="TEXT", help=MODEL_FLAG)
    own = {name: key for name, key in keys.items() if "." not in name}
    sections = groupby(((name, key) for name, key in keys.items() if "." in name), lambda item: item[1].section)
    for section, members in sections:
        items = dict(members)
        purpose = (section.__doc__ or "").splitlines()[0].rstrip(".")
        group = parser.add_argument_group(f"{next(iter(items)).rpartition('.')[0]} - {purpose}")
        for name, key in items.items():
            add_key(group, name, key)
    planning, options = parser.add_argument_group("planning"), parser.add_argument_group(f"options of {parser.prog}")
    for name, key in own.items():
        add_key(planning if key.section is PlanConfig else options, name, key)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names configuration files."""
    parser.add_argument("--config", "--config_path", metavar="FILE", action="append", help=CONFIG_FLAG)


def add_key(group: Any, name: str, key: Key) -> None:
    """Add the argument of one key: tuples take several values, booleans optionally one."""
    text = " ".join(key.documentation.split()).replace("%", "%%")
    if key.default not in (None, (), "", False):
        text = f"{text} (default: {key.default})"
    settings: dict[str, Any] = {"metavar": METAVARS[key.types[0]], "help": text, "dest": name}
    if tuple in key.types:
        settings |= {"nargs": "+", "action": "extend"}
    elif bool in key.types:
        settings |= {"nargs": "?", "const": True}
    group.add_argument(f"--{name}", **settings)
