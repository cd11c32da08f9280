"""Prints a launcher's script with the configuration and the plan in it, for `launch` and `launch train`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardplan.config.command_flags import EvalCommand, LaunchCommand, LaunchTrainCommand, TrainCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.config.keys import keys_of
from shardplan.config.load import command_of, other_arguments
from shardplan.config.sections import LaunchConfig, Target
from shardplan.errors import ConfigError, nearest
from shardplan.hardware import parse_slice
from shardplan.launch.job import EmbeddedFile, describe_job
from shardplan.launch.script import write_script

STARTED = {LaunchCommand: EvalCommand, LaunchTrainCommand: TrainCommand}
"""Command -> the command that its script starts on every host."""


def check_target(target: Target | None) -> Target:
    """Return the launcher that a configuration names; refuse a configuration that names none."""
    if target is None:
        raise ConfigError(f"launch needs a launcher: --to TARGET; {nearest('', Target)}")
    return target


def print_script(
    target: Target, argv: Sequence[str], config: LaunchCommand | LaunchTrainCommand, settings: LaunchConfig,
    output: str, inputs: Mapping[str, str],
) -> None:  # fmt: skip
    """Print the script that runs the command of `config`, `eval` or `train`, on every host.

    Args:
        argv: arguments of the launching command; arguments that are not its own are passed on.
        inputs: configuration key -> path that must exist on every host.
    """
    command = type(config)
    started = STARTED[command]
    files = [
        EmbeddedFile("--config", f"{number}-{os.path.basename(path)}", Path(path).read_text(encoding="utf-8"))
        for number, path in enumerate(map(os.path.expanduser, config.files), 1)
    ]
    config, plan = load_given_plan(config)
    if plan is not None:
        values = replace(plan, details=None).to_json()
        files.append(EmbeddedFile("--plan", "plan.json", json.dumps(values, separators=(",", ":"))))
    # the keys of launching are not among the arguments that are passed on, and the plan is embedded
    own_keys = {*keys_of(command).keys() - keys_of(started).keys(), "plan"}
    arguments = other_arguments(argv, command, own_keys)
    hardware = parse_slice(config.hardware.slice)
    job = describe_job(command_of(started), settings, hardware, files, arguments, inputs, output)
    sys.stdout.write(write_script(target, job))
