"""Prints the verdicts of the TPU compiler as tables, and converts them to text and JSON."""

import signal
from collections.abc import Iterator, Sequence
from typing import assert_never

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.plan.file.sections import MemoryVerdict
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.plan.summary import NEGLIGIBLE, percent_text, print_fit, step_text
from shardplan.report.text import make_table, print_bullets, print_first_fitting, print_wrapped, with_path_ends
from shardplan.verify.verdict import (
    Buffer,
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

CRASH_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGTRAP)
"""Signals that end a process for what it does itself; others are sent from outside."""
MAX_COLLECTIVES = 12
"""Maximum number of collectives in the table; the JSON has all of them."""
MIN_BYTES = 2**20
"""Fewest bytes per step of a collective that is shown."""
COLLECTIVE_COLUMNS = (
    (("kind", "mesh axes", "form"), ("GiB", "count", "link s")),
    (("kind",), ("GiB", "count", "link s")),
    (("kind",), ("GiB", "link s")),
)
"""Text columns and number columns of the table of collectives, from the fullest form to the narrowest."""
RANKING_COLUMNS = (
    (
        ("program", "slice", "mesh", "batch", "outcome"),
        ("peak GiB", "step s", "us/token", "vs fastest", "MFU", "GiB received"),
    ),
    (("outcome", "mesh", "batch"), ("peak GiB", "step s", "vs fastest", "MFU")),
    (("outcome",), ("peak GiB", "step s", "vs fastest", "MFU")),
)
"""Text columns and number columns of the ranking, from the fullest form to the narrowest."""

_OMISSION_TEXTS = {
    OmissionKind.MODULE_TEXT: "left out: the compiled module: {detail}",
    OmissionKind.MODULE_STRUCTURE: "left out: {detail}",
    OmissionKind.INSTRUCTION: "left out: {subject}: {detail}",
    OmissionKind.NO_CYCLES: "assumed: {subject} without cycles takes as long as reading and writing its result",
    OmissionKind.SCATTER: (
        "assumed: {subject} without cycles takes as long as reading its updates, and changing as many rows"
    ),
    OmissionKind.TRIP_COUNT: "assumed: a loop of unknown length runs once",
    OmissionKind.CONDITIONAL: "assumed: a conditional takes as long as its longest branch, and transfers for all",
    OmissionKind.ASYNC_CALL: "left out: asynchronous call without a collective",
    OmissionKind.REPLICA_GROUPS: "left out: {subject} with replica_groups {detail}",
}


def reason_text(reason: Reason | None) -> str:
    """Return the reason of a verdict on one line; empty for a verdict without a reason."""
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
            return _crash_text(exit_code, last_line)
        case Interrupted():
            return "interrupted"
        case _:
            assert_never(reason)


def _crash_text(exit_code: int, last_line: str) -> str:
    """Describe how the compiler's process ended without a result; a negative code is the number of a signal."""
    if exit_code >= 0:
        return f"the compiler ended with code {exit_code}: {last_line}"
    name = signal.Signals(-exit_code).name
    if -exit_code in CRASH_SIGNALS:
        return f"the compiler crashed ({name}): {last_line}"
    if -exit_code == signal.SIGKILL:
        return (
            f"the compiler was ended by {name}, as the system does when memory runs out; lower compiler.jobs, or use a "
            "machine with more memory"
        )
    return f"the compiler was ended by {name} from outside; start the command again"


def omission_text(omission: Omission) -> str:
    """Describe on one line what the reader of compiled modules ignored or approximated."""
    return _OMISSION_TEXTS[omission.kind].format(subject=omission.subject, detail=omission.detail)


def print_verdict(label: str, plan: Plan, verdict: Verdict, out: Console) -> None:
    """Print outcome, memory and speed of a program on two lines, then its details and largest collectives."""
    memory, time = verdict.memory, verdict.time
    if memory is not None:
        print_fit(MemoryVerdict(verdict.fits, memory.peak, memory.available), verdict.slice, out, f"{label}: ")
    else:
        print_wrapped(f" on {verdict.slice}", out, Text.assemble(f"{label}: ", (str(verdict.outcome), "bold red")))
    if time is not None:
        # MFU is of a step: the assembly of a model has no FLOPs that the model needs
        mfu = time.mfu if time.model_flops else None
        print_wrapped(step_text(plan, time.step_seconds, time.compute_seconds, mfu), out)
    if verdict.reason is not None:
        print_bullets([reason_text(verdict.reason)], out)
    print_wrapped(
        f" of {plan.model.name}, mesh {mesh_text(verdict.mesh)}, attention {verdict.attention or '-'}; libtpu "
        f"{verdict.versions.get('libtpu', '')}, compiled in {verdict.compile_seconds:.1f} s",
        out, Text(verdict.program, "bold"), indent="  ",
    )  # fmt: skip
    is_step = verdict.program == plan.workload.kind  # the plan predicts nothing about other programs
    if memory is not None:
        text = f"arguments {memory.arguments / GIB:.2f}, temporaries {memory.temporaries / GIB:.2f}"
        # without a time, the compiler's report has output among the temporaries
        text += f", output {memory.output / GIB:.2f} GiB" if time is not None else " GiB"
        if memory.host:
            text += f", of the host {memory.host / GIB:.2f} GiB"
        print_wrapped(text + (f"; the plan predicted {plan.memory.peak / GIB:.2f}" if is_step else ""), out, "memory  ")
        print_first_fitting(_buffer_tables(memory.buffers), out)
    if time is not None:
        text = (
            f"core {time.compute_seconds:.3g} s, waiting for transfers "
            f"{_seconds_text(time.step_seconds - time.compute_seconds, time.step_seconds)}"
        )
        print_wrapped(
            text + (f"; the plan's estimate is {plan.cost.step_seconds:.3g} s" if is_step else ""), out, "time    "
        )
        if time.masked_dense_seconds:
            part = f"{time.masked_dense_seconds / time.step_seconds:.0%} of the step"
            text = (
                f"{time.masked_dense_seconds:.3g} s ({part}) are grouped matmuls of experts that the "
                "compiler makes of dense ones over all experts: it has no kernel for the gradient of their weights"
            )
            print_bullets([text], out)
    elif verdict.fits and not verdict.not_understood:
        print_bullets(["the time of a step is not judged, because compiler.memory_only is set"], out)
    if verdict.collectives:
        print_first_fitting(_collective_tables(verdict.collectives), out)
    print_bullets(
        (
            f"{omission_text(omission)} ({count} times in the program)"
            for omission, count in verdict.not_understood.items()
        ),
        out,
    )


def print_ranking(rows: Sequence[tuple[str, Plan, Verdict]], out: Console) -> None:
    """Print several verdicts side by side, in the given order; times are compared per token."""
    print_first_fitting(_ranking_tables(rows), out)
    for label, plan, verdict in rows:
        if verdict.reason is not None:
            print_bullets([f"{label}: {reason_text(verdict.reason)}"], out)
        # the first reason of a given layout is that it was given; the others name its entries without effect
        if plan.search.given:
            print_bullets((f"{label}: {reason}" for reason in plan.search.reasons[1:]), out)


def _ranking_tables(rows: Sequence[tuple[str, Plan, Verdict]]) -> Iterator[Table]:
    """Yield tables of the verdicts, first with all columns, then with fewer."""
    per_token = [v.time.step_seconds / plan.workload.tokens if v.time is not None else None for _, plan, v in rows]
    fastest = min((seconds for seconds in per_token if seconds is not None), default=0.0)
    for texts, numbers in RANKING_COLUMNS:

        def build(labels: list[str], texts: Sequence[str] = texts, numbers: Sequence[str] = numbers) -> Table:
            table = make_table("Ranking", ("", *texts), numbers)
            for label, (_, plan, verdict), seconds in zip(labels, rows, per_token, strict=True):
                cells = _ranking_cells(plan, verdict, seconds, fastest)
                table.add_row(Text(label), *(cells[column] for column in (*texts, *numbers)))
            return table

        yield from with_path_ends(build, [label for label, *_ in rows])


def _ranking_cells(plan: Plan, verdict: Verdict, seconds: float | None, fastest: float) -> dict[str, str]:
    """Return the cells of a verdict by column.

    Args:
        seconds: seconds per token; None if unknown.
        fastest: the smallest seconds per token of all verdicts.
    """
    time, memory = verdict.time, verdict.memory
    return {
        "program": verdict.program,
        "slice": verdict.slice,
        "mesh": " x ".join(map(str, verdict.mesh.values())),
        "batch": f"{plan.workload.batch} x {plan.workload.position}",
        "outcome": verdict.outcome,
        "peak GiB": f"{memory.peak / GIB:.2f}" if memory else "-",
        "step s": f"{time.step_seconds:.3g}" if time else "-",
        "us/token": f"{seconds * 1e6:.3g}" if seconds is not None else "-",
        "vs fastest": percent_text(seconds / fastest - 1) if seconds is not None and fastest else "-",
        "MFU": f"{time.mfu:.1%}" if time and time.model_flops else "-",
        "GiB received": f"{sum(c.bytes for c in verdict.collectives) / GIB:.1f}" if time else "-",
    }


def _seconds_text(seconds: float, step_seconds: float) -> str:
    """Format the seconds of a part of a step; `none` if they are negligible."""
    return f"{seconds:.3g} s" if seconds >= NEGLIGIBLE * step_seconds else "none"


def _buffer_tables(buffers: Sequence[Buffer]) -> Iterator[Table]:
    """Yield tables of the largest buffers at the peak, first with all columns, then with fewer."""

    def build(ops: list[str]) -> Table:
        table = make_table("Largest buffers at the peak", ("operation", "shape"), ("GiB",))
        for op, buffer in zip(ops, buffers, strict=True):
            table.add_row(Text(op), Text(buffer.shape), f"{buffer.bytes / GIB:.3f}")
        return table

    return with_path_ends(build, [buffer.op for buffer in buffers])


def _collective_tables(collectives: Sequence[CompiledCollective]) -> Iterator[Table]:
    """Yield tables of the largest collectives (MAX_COLLECTIVES, MIN_BYTES); one row sums up the others."""
    shown = [c for c in collectives if c.bytes >= MIN_BYTES][:MAX_COLLECTIVES]
    rest = sum(c.bytes for c in collectives) - sum(c.bytes for c in shown)
    for texts, numbers in COLLECTIVE_COLUMNS:

        def build(causes: list[str], texts: Sequence[str] = texts, numbers: Sequence[str] = numbers) -> Table:
            title, is_narrow = "Collectives of a step, per device", (texts, numbers) == COLLECTIVE_COLUMNS[-1]
            table = make_table(title, ("operation", *texts), numbers, is_narrow=is_narrow)
            for c, cause in zip(shown, causes, strict=True):
                cells = {
                    "kind": c.kind,
                    "mesh axes": ", ".join(c.mesh_axes),
                    "form": c.form,
                    "GiB": f"{c.bytes / GIB:.3f}",
                    "count": f"{c.count:,}",
                    "link s": f"{c.seconds:.3g}",
                }
                table.add_row(Text(cause), *(cells[column] for column in (*texts, *numbers)))
            if rest:
                table.add_row("others", *("" for _ in texts), f"{rest / GIB:.3f}")
            return table

        yield from with_path_ends(build, [c.cause for c in shown])
