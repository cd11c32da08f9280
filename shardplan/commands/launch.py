"""`shardplan launch --config C --to gcloud`: print what starts `eval` on every host of the slice, for a launcher."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardplan.commands.inputs import local_inputs
from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand, LaunchCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.config.keys import keys_of
from shardplan.config.load import other_arguments
from shardplan.config.sections import Target
from shardplan.errors import ConfigError, nearest
from shardplan.eval.evaluate import check_evaluation
from shardplan.hardware import parse_slice
from shardplan.launch.job import EmbeddedFile, describe_job
from shardplan.launch.script import write_script

OWN_KEYS = {*keys_of(LaunchCommand).keys() - keys_of(EvalCommand).keys(), "plan"}
"""Keys that are not among the arguments of eval, or, as the plan, are embedded."""


def main(argv: Sequence[str]) -> None:
    """Run `shardplan launch` with the arguments `argv`."""
    config = parse_config(argv, LaunchCommand)
    target = config.to
    if target is None:
        raise ConfigError(f"launch needs a launcher: --to TARGET; {nearest('', Target)}")
    check_evaluation(config)
    files = [
        EmbeddedFile("--config", f"{number}-{os.path.basename(path)}", Path(path).read_text(encoding="utf-8"))
        for number, path in enumerate(map(os.path.expanduser, config.files), 1)
    ]
    config, plan = load_given_plan(config)
    if plan is not None:
        values = replace(plan, details=None).to_json()
        files.append(EmbeddedFile("--plan", "plan.json", json.dumps(values, separators=(",", ":"))))
    arguments = other_arguments(argv, LaunchCommand, OWN_KEYS)
    hardware, inputs = parse_slice(config.hardware.slice), local_inputs(config)
    job = describe_job(config.launch, hardware, files, arguments, inputs, config.output)
    sys.stdout.write(write_script(target, job))
