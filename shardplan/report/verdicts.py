"""Prints the verdicts of the TPU compiler as tables, and turns them into text and JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any, assert_never

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.verify.verdict import (
    CompiledCollective,
    CompileError,
    CompilerCrash,
    DuplicateMeshAxis,
    Interrupted,
    MemoryLimit,
    Omission,
    OmissionKind,
    OutOfMemory,
    Reason,
    TimeLimit,
    Verdict,
)

MAX_COLLECTIVES = 12
"""Number of collectives that the table shows; the JSON has all."""
MIN_BYTES = 2**20
"""Collectives that transfer fewer bytes in a step are not shown."""

_OMISSION_TEXTS = {
    OmissionKind.MODULE_TEXT: "the compiled module: {detail}",
    OmissionKind.MODULE_STRUCTURE: "{detail}",
    OmissionKind.INSTRUCTION: "{subject}: {detail}",
    OmissionKind.NO_CYCLES: "{subject} without cycles, timed as reading and writing its result",
    OmissionKind.TRIP_COUNT: "loop of unknown length, counted once",
    OmissionKind.CONDITIONAL: "conditional: every branch counted, the longest timed",
    OmissionKind.ASYNC_CALL: "asynchronous call without a collective",
    OmissionKind.REPLICA_GROUPS: "{subject} with replica_groups {detail}",
}


def reason_text(reason: Reason | None) -> str:
    """The reason of a verdict on one line; empty if there is none."""
    match reason:
        case None:
            return ""
        case OutOfMemory(excess, buffers):
            largest = "; ".join(f"{b.bytes / GIB:.2f} GiB {b.shape} ({b.op})" for b in buffers)
            return f"{excess / GIB:.2f} GiB too much" + (f"; the largest: {largest}" if largest else "")
        case CompileError(message):
            return message
        case DuplicateMeshAxis(parameter, axes, mesh_axis):
            return f"DuplicateSpecError: {', '.join(axes)} of {parameter} are all mapped to {mesh_axis!r}"
        case TimeLimit(seconds):
            return f"not compiled in {seconds} s; raise compiler.seconds"
        case MemoryLimit(gib):
            return f"compiling took more than {gib:g} GiB of this machine; raise compiler.gib"
        case CompilerCrash(exit_code, last_line):
            return f"the compiler ended with code {exit_code}: {last_line}"
        case Interrupted():
            return "interrupted"
        case _:
            assert_never(reason)


def omission_text(omission: Omission) -> str:
    """One line on what the reader of a compiled module left out or approximated."""
    return _OMISSION_TEXTS[omission.kind].format(subject=omission.subject, detail=omission.detail)


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values, reason and omissions as text; bytes are per device."""
    return {
        **dataclasses.asdict(dataclasses.replace(verdict, reason=None, not_understood={})),
        "reason": reason_text(verdict.reason),
        "not_understood": {omission_text(omission): count for omission, count in verdict.not_understood.items()},
    }


def print_verdict(label: str, plan: Plan, verdict: Verdict, out: Console) -> None:
    """Print outcome, memory with its largest buffers, time, and collectives of one program."""
    mesh = mesh_text(verdict.mesh)
    colour = "green" if verdict.fits else "red"
    libtpu = verdict.versions.get("libtpu", "")
    out.print(
        f"{escape(label)}: [bold]{verdict.program}[/bold] of {escape(plan.model.name)} on {verdict.slice}, "
        f"mesh {mesh}, attention {verdict.attention or '-'}: [bold {colour}]{verdict.outcome}[/bold {colour}] "
        f"(libtpu {libtpu}, {verdict.compile_seconds:.1f} s)",
        soft_wrap=True,
    )
    if verdict.reason is not None:
        out.print(f"  · {reason_text(verdict.reason)}", markup=False, soft_wrap=True)
    memory, time = verdict.memory, verdict.time
    is_step = verdict.program == plan.workload.kind  # the plan predicts nothing about other programs
    if memory is not None:
        free = memory.available - memory.peak
        out.print(
            f"memory  peak {memory.peak / GIB:.2f} of {memory.available / GIB:.2f} GiB per device "
            f"({abs(free) / GIB:.2f} {'free' if free >= 0 else 'too much'}): arguments {memory.arguments / GIB:.2f}, "
            f"temporaries {memory.temporaries / GIB:.2f}, output {memory.output / GIB:.2f}"
            + (f"; the plan predicted {plan.memory.peak / GIB:.2f}" if is_step else ""),
            soft_wrap=True,
        )
        out.print(_buffer_table(verdict))
    if time is not None:
        waiting = time.step_seconds - time.compute_seconds
        out.print(
            f"time    modelled step {time.step_seconds:.3g} s: core {time.compute_seconds:.3g} s, waiting for "
            f"transfers {waiting:.3g} s"
            + (f"; MFU {time.mfu:.1%}; the plan's estimate is {plan.cost.step_seconds:.3g} s" if is_step else ""),
            soft_wrap=True,
        )
    if verdict.collectives:
        out.print(_collective_table(verdict.collectives))
    for omission, count in verdict.not_understood.items():
        text = omission_text(omission)
        out.print(f"  · left out: {text} ({count} times in the program)", markup=False, soft_wrap=True)


def print_ranking(rows: Sequence[tuple[str, Plan, Verdict]], out: Console) -> None:
    """Print several verdicts side by side, in the order given; time is compared per token."""
    table = Table(title="Ranking", title_justify="left", header_style="bold")
    for column in ("", "program", "slice", "mesh", "batch", "outcome"):
        table.add_column(column, overflow="fold")
    for column in ("peak GiB", "step s", "us/token", "vs fastest", "MFU", "GiB received"):
        table.add_column(column, justify="right")
    table.add_column("reason", overflow="fold")
    per_token = [v.time.step_seconds / plan.workload.tokens if v.time is not None else None for _, plan, v in rows]
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
            escape(reason_text(verdict.reason)),
        )
    out.print(table)
    for label, plan, _ in rows:
        # the first reason of a given layout is that it was given; the others name its entries without effect
        for reason in plan.search.reasons[1:] if plan.search.given else ():
            out.print(f"  · {label}: {reason}", markup=False, soft_wrap=True)


def _buffer_table(verdict: Verdict) -> Table:
    """Return a table of the largest buffers at the peak of a verdict that has memory."""
    table = Table(title="Largest buffers at the peak", title_justify="left", header_style="bold")
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("shape", overflow="fold")
    table.add_column("operation", overflow="fold")
    assert verdict.memory is not None
    for buffer in verdict.memory.buffers:
        table.add_row(f"{buffer.bytes / GIB:.3f}", escape(buffer.shape), escape(buffer.op))
    return table


def _collective_table(collectives: Sequence[CompiledCollective]) -> Table:
    """Return a table of at most MAX_COLLECTIVES collectives of MIN_BYTES or more; one row sums up the others."""
    shown = [c for c in collectives if c.bytes >= MIN_BYTES][:MAX_COLLECTIVES]
    table = Table(title="Collectives of a step, per device", title_justify="left", header_style="bold")
    for column in ("kind", "form", "mesh axes"):
        table.add_column(column)
    for column in ("GiB", "count", "link s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("operation", overflow="fold")
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
