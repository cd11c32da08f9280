"""Where a command writes: tables, JSON on stdout, or files."""

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from shardplan.config import Config
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_writable


def beside(config: Config) -> TextIO:
    """Where tables go that are no part of the Plan: with `--json -` stdout is the Plan's."""
    return sys.stderr if config.json == "-" else sys.stdout


def write_json(values: Any, target: str) -> None:
    """Write JSON to the path `target`, or with `-` to stdout."""
    text = json.dumps(values, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def check_targets(config: Config) -> None:
    """Complain about a place the Plan cannot be written to before planning rather than after."""
    if config.json not in (None, "-"):
        check_writable("json", str(config.json))


def show(plan: Plan, json_target: str | None) -> None:
    """Print the plan's tables, or with `-` its JSON; any other `json_target` is a file that gets the JSON as well."""
    if json_target == "-":
        write_json(plan.to_json(), json_target)
        return
    from shardplan.report.tables import console, print_plan

    print_plan(plan, console(sys.stdout))
    if json_target is not None:
        plan.save(json_target)
