"""The first two lines of every report: fit, GiB per device, speed, and bottleneck."""

from rich.console import Console
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.plan.file.sections import MemoryVerdict
from shardplan.plan.plan import Plan
from shardplan.report.text import print_wrapped

NEGLIGIBLE = 1e-3
"""Fraction of a step's time below which a number is not shown."""


def print_estimate(plan: Plan, out: Console) -> None:
    """Print the verdict on a plan by its own estimate, on two lines at 80 columns."""
    print_fit(plan.memory.verdict, plan.hardware.slice, out)
    print_wrapped(speed_text(plan), out)


def print_fit(memory: MemoryVerdict, slice_name: str, out: Console, label: str = "") -> None:
    """Print on one line whether a step fits, and the memory that is free or missing.

    Args:
        label: text at the beginning of the line.
    """
    verdict = Text("fits", "bold green") if memory.fits else Text("does not fit", "bold red")
    gib, limit_gib = f"{memory.bytes / GIB:.2f}", f"{memory.limit / GIB:.2f}"
    rest = f"{abs(memory.limit - memory.bytes) / GIB:.2f}"
    text = (
        f" {slice_name}: {gib} of {limit_gib} GiB {memory.place}, {rest} GiB free"
        if memory.fits
        else f" {slice_name}: {gib} GiB {memory.place} needed, {limit_gib} usable: {rest} missing"
    )
    print_wrapped(text, out, Text.assemble(label, verdict), indent="")


def speed_text(plan: Plan) -> str:
    """Return the estimated speed of a plan on one line; see `step_text`."""
    return step_text(plan, plan.cost.step_seconds, plan.cost.compute_seconds, plan.mfu)


def step_text(plan: Plan, seconds: float, compute_seconds: float, mfu: float | None) -> str:
    """Describe a step: its seconds, tokens and scored windows per second, MFU if known, and its largest cost.

    Args:
        compute_seconds: the part of `seconds` in which a device computes; for the rest it waits for collectives.
    """
    parts = [f"{seconds:.3g} s a step"]
    if seconds:
        part = compute_seconds / seconds
        parts.append(f"{plan.workload.tokens / seconds:,.0f} tokens/s")
        if plan.workload.is_scoring:
            parts.append(f"{plan.workload.windows / seconds:,.0f} windows/s")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        parts.append(f"limited by compute ({part:.0%})" if part >= 0.5 else f"limited by collectives ({1 - part:.0%})")
    return ", ".join(parts)


def percent_text(part: float) -> str:
    """Format a relative difference with its sign; `same` if it is negligible."""
    return f"{part:+.1%}" if abs(part) >= NEGLIGIBLE else "same"
