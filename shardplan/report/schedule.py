"""Prints the read schedule of a checkpoint: how each array is read, and how much each process reads."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardplan.checkpoint.forecast import Forecast
from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan


def print_forecast(forecast: Forecast, plan: Plan, out: Console) -> None:
    """Print every array and how it is read, then what the processes read and how long that takes."""
    mesh = f"mesh {mesh_text(plan.mesh)} of {plan.hardware.slice}"
    out.print(f"[bold]{escape(plan.model.name)}[/bold] · {mesh} · {escape(forecast.source)}", soft_wrap=True)
    table = Table(title="Arrays")
    for title in ("array", "read strategy", "GiB read", "transfers", "ranges"):
        table.add_column(title, justify="left" if title in ("array", "read strategy") else "right")
    for array in forecast.arrays:
        table.add_row(
            escape(array.path), array.sharing, f"{array.nbytes / GIB:.2f}", str(array.transfers), str(array.ranges)
        )
    out.print(table)
    sizes = [ranges.bytes for ranges in forecast.processes.values()]
    counts = [ranges.count for ranges in forecast.processes.values()]
    out.print(
        f"{len(sizes)} processes read {min(sizes) / GIB:.2f} to {max(sizes) / GIB:.2f} GiB each, in {min(counts)} to "
        f"{max(counts)} ranges; together {forecast.fleet_bytes / forecast.checkpoint_bytes:.3f} x the "
        f"{forecast.checkpoint_bytes / GIB:.2f} GiB of the checkpoint",
        soft_wrap=True,
    )
    out.print(
        f"at the {forecast.network_bandwidth / 1e9:.1f} GB/s of a host's network: {forecast.seconds:.2f} s",
        soft_wrap=True,
    )
