"""Prints why a plan does not make a choice, and what other settings would change."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardplan.explain.what_if import Variant
from shardplan.explain.why_not import WhyNot
from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan


def print_why(answers: Sequence[WhyNot], plan: Plan, out: Console) -> None:
    """Print for every choice what forbids it, or how much slower and larger the best plan with it is, by cause."""
    for answer in answers:
        out.print(f"\n[bold]why not {answer.choice}?[/bold]", soft_wrap=True)
        other = answer.plan
        if answer.obstacle:
            out.print(f"  · {answer.obstacle}", soft_wrap=True, markup=False)
        if answer.replaced_pins:
            out.print(f"  · instead of {' and '.join(answer.replaced_pins)}", soft_wrap=True, markup=False)
        if other is None:
            continue
        seconds = other.cost.step_seconds - plan.cost.step_seconds
        bytes_ = other.memory.peak - plan.memory.peak
        mesh = mesh_text(other.mesh)
        if not seconds and not bytes_:
            out.print("  · the plan makes this choice", soft_wrap=True)
            continue
        out.print(
            f"  · the best plan with it, mesh {mesh}, takes {other.cost.step_seconds:.3g} s a step "
            f"({seconds / plan.cost.step_seconds:+.1%}) and {other.memory.peak / GIB:.2f} GiB ({bytes_ / GIB:+.2f})",
            soft_wrap=True,
        )
        for cause, difference in answer.seconds.items():
            out.print(f"  · {difference:+.3g} s: {cause}", soft_wrap=True, markup=False)


def print_what_if(variants: Sequence[Variant], out: Console) -> None:
    """Print one table row per change of the settings, then why some changes have no plan."""
    table = Table(title="What if", title_justify="left", header_style="bold")
    table.add_column("change", overflow="fold")
    for column in ("mesh", "GiB of available", "step s", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant in variants:
        table.add_row(variant.change, *_cells(variant))
    out.print(table)
    for variant in variants:
        if variant.plan is None:
            out.print(f"  · {variant.change}: {variant.obstacle}", soft_wrap=True, markup=False)


def _cells(variant: Variant) -> list[str]:
    """Return the mesh, memory, step time and tokens per second of a variant; `none` if it has no plan."""
    plan = variant.plan
    if plan is None:
        return ["none", "", "", ""]
    tokens = plan.workload.batch * plan.workload.position
    return [
        " x ".join(map(str, plan.mesh.values())),
        f"{plan.memory.peak / GIB:.2f} of {plan.memory.available / GIB:.2f}",
        f"{plan.cost.step_seconds:.3g}",
        f"{tokens / plan.cost.step_seconds:,.0f}",
    ]
