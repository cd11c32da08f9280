"""What the TPU compiler said, as tables on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.verify.verdict import CompiledCollective, Verdict

COLLECTIVES = 12
"""Rows of collectives that are shown; the JSON has all."""
NOTABLE_BYTES = 2**20
"""Collectives that move less in a step are not shown."""


def print_verdict(label: str, plan: Plan, verdict: Verdict, out: Console) -> None:
    """Outcome, memory with its largest buffers, time, and collectives of one program."""
    mesh = mesh_text(verdict.mesh)
    colour = "green" if verdict.fits else "red"
    libtpu = verdict.versions.get("libtpu", "")
    out.print(
        f"{escape(label)}: [bold]{verdict.program}[/bold] of {escape(plan.model.name)} on {verdict.slice}, "
        f"mesh {mesh}, attention {verdict.attention or '-'}: [bold {colour}]{verdict.outcome}[/bold {colour}] "
        f"(libtpu {libtpu}, {verdict.compile_seconds:.1f} s)",
        soft_wrap=True,
    )
    if verdict.reason:
        out.print(f"  · {verdict.reason}", markup=False, soft_wrap=True)
    memory, time = verdict.memory, verdict.time
    is_step = verdict.program == plan.workload.kind  # what the plan predicts
    if memory is not None:
        free = memory.available - memory.peak
        out.print(
            f"memory  peak {memory.peak / GIB:.2f} of {memory.available / GIB:.2f} GiB per device "
            f"({abs(free) / GIB:.2f} {'free' if free >= 0 else 'too much'}): arguments {memory.arguments / GIB:.2f}, "
            f"temporaries {memory.temporaries / GIB:.2f}, output {memory.output / GIB:.2f}"
            + (f"; the plan predicted {plan.memory.peak / GIB:.2f}" if is_step else ""),
            soft_wrap=True,
        )
        out.print(_buffers(verdict))
    if time is not None:
        waiting = time.step_seconds - time.compute_seconds
        out.print(
            f"time    modelled step {time.step_seconds:.3g} s: core {time.compute_seconds:.3g} s, waiting for "
            f"transfers {waiting:.3g} s"
            + (f"; MFU {time.mfu:.1%}; the plan's estimate is {plan.cost.step_seconds:.3g} s" if is_step else ""),
            soft_wrap=True,
        )
    if verdict.collectives:
        out.print(_collectives(verdict.collectives))
    for what, count in verdict.not_understood.items():
        out.print(f"  · left out: {what} ({count} times in the program)", markup=False, soft_wrap=True)


def print_ranking(rows: Sequence[tuple[str, Plan, Verdict]], out: Console) -> None:
    """Several verdicts side by side, in the order given; time is compared per token."""
    table = Table(title="Ranking", title_justify="left", header_style="bold")
    for column in ("", "program", "slice", "mesh", "batch", "outcome"):
        table.add_column(column, overflow="fold")
    for column in ("peak GiB", "step s", "us/token", "behind", "MFU", "GiB moved"):
        table.add_column(column, justify="right")
    table.add_column("why not", overflow="fold")
    per_token = [
        v.time.step_seconds / (plan.workload.batch * plan.workload.position) if v.time is not None else None
        for _, plan, v in rows
    ]
    fastest = min((seconds for seconds in per_token if seconds is not None), default=0.0)
    for (label, plan, verdict), seconds in zip(rows, per_token, strict=True):
        time, memory = verdict.time, verdict.memory
        table.add_row(
            escape(label),
            verdict.program,
            verdict.slice,
            " x ".join(map(str, verdict.mesh.values())),
            f"{plan.workload.batch} x {plan.workload.position}",
            verdict.outcome,
            f"{memory.peak / GIB:.2f}" if memory else "-",
            f"{time.step_seconds:.3g}" if time else "-",
            f"{seconds * 1e6:.3g}" if seconds is not None else "-",
            f"{seconds / fastest - 1:+.1%}" if seconds is not None and fastest else "-",
            f"{time.mfu:.1%}" if time and time.model_flops else "-",
            f"{sum(c.bytes for c in verdict.collectives) / GIB:.1f}" if time else "-",
            escape(verdict.reason),
        )
    out.print(table)
    for label, plan, _ in rows:
        # of a layout that was given: what in it does nothing
        for reason in plan.search.reasons[1:] if plan.search.given else ():
            out.print(f"  · {label}: {reason}", markup=False, soft_wrap=True)


def _buffers(verdict: Verdict) -> Table:
    table = Table(title="Largest buffers at the peak", title_justify="left", header_style="bold")
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("made by", overflow="fold")
    assert verdict.memory is not None
    for buffer in verdict.memory.buffers:
        table.add_row(f"{buffer.bytes / GIB:.3f}", escape(buffer.shape), escape(buffer.op))
    return table


def _collectives(collectives: Sequence[CompiledCollective]) -> Table:
    shown = [c for c in collectives if c.bytes >= NOTABLE_BYTES][:COLLECTIVES]
    table = Table(title="Collectives of a step, per device", title_justify="left", header_style="bold")
    for column in ("kind", "form", "mesh axes"):
        table.add_column(column)
    for column in ("GiB", "times", "s on the link"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("for", overflow="fold")
    for c in shown:
        table.add_row(
            c.kind,
            c.form,
            ", ".join(c.mesh_axes),
            f"{c.bytes / GIB:.3f}",
            f"{c.count:,}",
            f"{c.seconds:.3g}",
            escape(c.cause),
        )
    rest = sum(c.bytes for c in collectives) - sum(c.bytes for c in shown)
    if rest:
        table.add_row("others", "", "", f"{rest / GIB:.3f}", "", "", "")
    return table
