"""The views of each `Displayed` class: a text, a short text, and a picture."""

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from shardplan.explain.rank_slices import SliceRanking
from shardplan.explain.what_if import WhatIf
from shardplan.explain.why_not import WhyNot
from shardplan.lint.repair import Review
from shardplan.monitoring.audit import Audit, format_audit
from shardplan.plan.displayed import Displayed
from shardplan.plan.file.parameters import Tiles
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.notebook.parameters import audit_html, tiles_html, tiles_lines
from shardplan.report.notebook.short import plan_html, verdict_html, verdict_lines
from shardplan.report.plan.explain import print_what_if, print_why
from shardplan.report.plan.lint import print_review
from shardplan.report.plan.slice_ranking import print_slice_ranking
from shardplan.report.plan.summary import print_estimate
from shardplan.report.plan.tables import print_plan
from shardplan.verify.verdict import Verdict

WIDTH = 100
"""Columns of text outside of a terminal."""
Print = Callable[[Any, Console], None]


@dataclass(frozen=True)
class Display:
    """The views of a class's objects."""

    text: Print
    """Prints the text that `print` shows."""
    short: Print | None = None
    """Short text that IPython shows for a cell's value if it shows no pictures; None for the complete text."""
    picture: Callable[[Any], str] | None = None
    """HTML for notebooks, without links and scripts; None for objects that have only text."""


def full_text(shown: Displayed) -> str:
    """Return the text that `print` shows for an object."""
    return _print_to_text(DISPLAYS[type(shown)].text, shown)


def short_text(shown: Displayed) -> str:
    """Return the text that IPython in a terminal shows for an object."""
    display = DISPLAYS[type(shown)]
    return _print_to_text(display.short or display.text, shown)


def picture(shown: Displayed) -> str | None:
    """Return the HTML that a notebook shows for an object; None if it shows the text."""
    draw = DISPLAYS[type(shown)].picture
    return None if draw is None else draw(shown)


def _print_to_text(print_: Print, shown: Displayed) -> str:
    stream = io.StringIO()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    # in a notebook Rich would display what it prints, in place of writing it to the stream
    print_(shown, Console(file=stream, width=width, force_terminal=False, force_jupyter=False))
    return stream.getvalue().strip("\n")


def _print_lines(lines: list[str], out: Console) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_short_plan(plan: Plan, out: Console) -> None:
    print_estimate(plan, out)
    _print_lines([f"mesh {mesh_text(plan.mesh)}"], out)


DISPLAYS: dict[type, Display] = {
    Plan: Display(print_plan, _print_short_plan, plan_html),
    Verdict: Display(lambda verdict, out: _print_lines(verdict_lines(verdict), out), picture=verdict_html),
    Tiles: Display(lambda tiles, out: _print_lines(tiles_lines(tiles), out), picture=tiles_html),
    Audit: Display(lambda audit, out: _print_lines([format_audit(audit.arrays)], out), picture=audit_html),
    WhyNot: Display(lambda answer, out: print_why([answer], out)),
    WhatIf: Display(lambda answer, out: print_what_if(answer.variants, out)),
    SliceRanking: Display(print_slice_ranking),
    Review: Display(print_review),
}
"""Class -> the views of its objects."""
