"""The outputs of a command: tables, JSON on stdout, or files."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_writable, write_text

if TYPE_CHECKING:
    from shardplan.report.page.judgement import Judgement
    from shardplan.report.page.panels.repair import RepairPanel
    from shardplan.verify.case import Case
    from shardplan.verify.verdict import Verdict


def side_stream(json_target: str | None) -> TextIO:
    """Return the stream for tables: stderr if the command's JSON goes to stdout (`--json -`), else stdout."""
    return sys.stderr if json_target == "-" else sys.stdout


def write_json(values: Any, target: str) -> None:
    """Write JSON to the path `target`, or with `-` to stdout."""
    text = json.dumps(values, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_text("json", target, text)


def check_outputs(inputs: Iterable[str], **targets: str | None) -> None:
    """Check, before long work, that outputs can be written and that none replaces an input or another output.

    Args:
        inputs: paths of files and folders that the command reads.
        targets: configuration key -> output path; None and `-` (stdout) can always be written.

    Raises:
        ConfigError: an output cannot be written, or would replace another file.
    """
    used = {os.path.realpath(path) for path in inputs}
    for key, target in targets.items():
        if target is None or target == "-":
            continue
        check_writable(key, target)
        path = os.path.realpath(target)
        # in a folder that is read, an existing file is an input
        if path in used or (os.path.exists(path) and os.path.dirname(path) in used):
            raise ConfigError(
                f"{key} {target!r} would replace what the command reads or writes itself; name another file"
            )
        used.add(path)


def write_report(
    target: str,
    plan: Plan,
    verdicts: "Sequence[tuple[Case, Verdict]]",
    judgements: "Sequence[Judgement]" = (),
    repair: "RepairPanel | None" = None,
    experts: "Mapping[str, Any] | None" = None,
    selection: "Mapping[str, Any] | None" = None,
) -> None:
    """Write the page of a plan to the path `target`.

    Args:
        verdicts: verdicts on the plan, and on other plans to compare.
        judgements: verdicts that were read from a file.
        repair: review of a hand-written layout, for which `plan` is the prediction.
        experts: the section `experts` of the summary of an evaluation.
        selection: the section `selection` of the summary of a training.
    """
    from shardplan.report.page.judgement import judge
    from shardplan.report.page.page import plan_page
    from shardplan.report.page.panels.experts import experts_panel
    from shardplan.report.page.panels.selection import selection_panel

    judged = [judge(case.label, case.plan, verdict) for case, verdict in verdicts]
    panel = experts_panel(experts) if experts is not None and experts["layers"] else None
    selected = selection_panel(selection) if selection is not None else None
    write_text("report", target, plan_page(plan, [*judged, *judgements], repair, panel, selected))


def show_plan(plan: Plan, json_target: str | None, with_parameters: bool = True) -> None:
    """Print the plan, unless its JSON goes to stdout; see `print_plan`."""
    if json_target != "-":
        from shardplan.report.console import console
        from shardplan.report.plan.tables import print_plan

        print_plan(plan, console(sys.stdout), with_parameters)
