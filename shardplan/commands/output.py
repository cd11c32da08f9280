"""Where a command writes: tables, JSON on stdout, or files."""

import json
import sys
from typing import Any, TextIO

from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_writable, write_text


def side_stream(json_target: str | None) -> TextIO:
    """The stream for tables beside the command's JSON: stderr if the JSON goes to stdout (`--json -`)."""
    return sys.stderr if json_target == "-" else sys.stdout


def write_json(values: Any, target: str) -> None:
    """Write JSON to the path `target`, or with `-` to stdout."""
    text = json.dumps(values, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text("json", target, text)


def check_json_target(json_target: str | None) -> None:
    """Check before long work that the JSON can be written; without a target and for stdout it always can.

    Raises:
        ConfigError: it cannot.
    """
    if json_target not in (None, "-"):
        check_writable("json", str(json_target))


def output_plan(plan: Plan, json_target: str | None) -> None:
    """Print the plan's tables, or with `-` its JSON; any other `json_target` is a file that gets the JSON as well."""
    if json_target == "-":
        write_json(plan.to_json(), json_target)
        return
    from shardplan.report import tables

    try:
        tables.print_plan(plan, tables.console(sys.stdout))
        sys.stdout.flush()
    finally:  # also if the reader of the tables, such as head, has gone
        if json_target is not None:
            write_json(plan.to_json(), json_target)
