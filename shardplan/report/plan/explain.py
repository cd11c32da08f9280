"""Prints why a plan does not make a choice, and how other settings would change it."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from shardplan.explain.what_if import Variant, summarize_failures
from shardplan.explain.why_not import WhyNot
from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.plan.attention import attention_rows
from shardplan.report.plan.parameter_groups import merge_equal_rows
from shardplan.report.plan.summary import percent_text
from shardplan.report.text import make_table, print_bullets, print_first_fitting, print_wrapped

WHAT_IF_COLUMNS = (("mesh", "GiB of available", "step s", "tokens/s"), ("GiB", "step s", "tokens/s"))
"""Columns of the table of variants, from the fullest form to the narrowest."""


def print_why(answers: Sequence[WhyNot], out: Console) -> None:
    """Print what prevents each choice, or what the best plan with it costs: more time by cause, and memory."""
    for answer in answers:
        out.print()
        print_wrapped("", out, Text(f"why not {answer.choice}?", "bold"))
        print_bullets(_answer_lines(answer), out)


def _answer_lines(answer: WhyNot) -> Iterator[str]:
    """Yield the arguments against a choice, one sentence each."""
    if answer.obstacle:
        yield answer.obstacle
    if answer.replaced_pins:
        yield f"instead of {' and '.join(answer.replaced_pins)}"
    plan, other = answer.original, answer.plan
    if other is None:
        return
    seconds = other.cost.step_seconds - plan.cost.step_seconds
    bytes_ = other.memory.peak - plan.memory.peak
    if not seconds and not bytes_:
        yield "the plan makes this choice"
        return
    yield (
        f"the best plan with it, mesh {mesh_text(other.mesh)}, takes {other.cost.step_seconds:.3g} s a step "
        f"({percent_text(seconds / plan.cost.step_seconds)}) and {other.memory.peak / GIB:.2f} GiB "
        f"({bytes_ / GIB:+.2f})"
    )
    yield from _changes_of_attention(plan, other)
    causes = list(answer.seconds)
    for text, numbers in merge_equal_rows([(cause, f"{answer.seconds[cause]:.3g}") for cause in causes]):
        difference = sum(answer.seconds[causes[number]] for number in numbers)
        yield f"{difference:+.3g} s: {text}"


def _changes_of_attention(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield a change for each kind of attention that `other` and `plan` compute by different methods."""
    before = {row.kind: row for row in attention_rows(plan)}
    for row in attention_rows(other):
        if row.kind in before and row.method != before[row.kind].method:
            old = before[row.kind]
            methods = f"by {row.method} instead of {old.method}"
            yield f"{row.seconds - old.seconds:+.3g} s: attention of {row.layers}, {row.kind}, {methods}"


def print_what_if(variants: Sequence[Variant], out: Console) -> None:
    """Print one table row per changed setting that has a plan, then why the others have none."""
    planned = [(variant.change, variant.plan) for variant in variants if variant.plan is not None]
    tables = []
    for columns in WHAT_IF_COLUMNS:
        table = make_table("What if", ("change",), columns)
        for change, plan in planned:
            cells = _cells(plan)
            table.add_row(Text(change), *(cells.get(column, "") for column in columns))
        tables.append(table)
    if planned:
        print_first_fitting(tables, out)
    else:
        print_wrapped(": no change of one setting gives a plan", out, Text("What if", "bold"))
    print_bullets(summarize_failures(variants), out)


def _cells(plan: Plan) -> dict[str, str]:
    """Return the cells of a variant's plan by column."""
    peak = f"{plan.memory.peak / GIB:.2f}"
    return {
        "mesh": " x ".join(map(str, plan.mesh.values())),
        "GiB of available": f"{peak} of {plan.memory.available / GIB:.2f}",
        "GiB": peak,
        "step s": f"{plan.cost.step_seconds:.3g}",
        "tokens/s": f"{plan.workload.tokens / plan.cost.step_seconds:,.0f}",
    }
