"""Prints the read schedule of a checkpoint: how each array is read, and the bytes of each process."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.checkpoint.forecast import ArrayForecast, Forecast
from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.text import make_table, print_first_fitting, print_wrapped, with_path_ends


def print_forecast(forecast: Forecast, plan: Plan, out: Console) -> None:
    """Print the bytes and seconds of the processes, then how each array is read."""
    sizes = [ranges.bytes for ranges in forecast.processes.values()]
    counts = [ranges.count for ranges in forecast.processes.values()]
    print_wrapped(
        f"{len(sizes)} processes read {min(sizes) / GIB:.2f} to {max(sizes) / GIB:.2f} GiB each, in {min(counts)} to "
        f"{max(counts)} ranges; together {forecast.fleet_bytes / forecast.checkpoint_bytes:.3f} x the "
        f"{forecast.checkpoint_bytes / GIB:.2f} GiB of the checkpoint",
        out,
    )
    print_wrapped(
        f"at the {forecast.network_bandwidth / 1e9:.1f} GB/s of a host's network: {forecast.seconds:.2f} s", out
    )
    about = f" · mesh {mesh_text(plan.mesh)} of {plan.hardware.slice} · {forecast.source}"
    print_wrapped(about, out, Text(plan.model.name, "bold"), indent="  ")

    print_first_fitting(_array_tables(forecast.arrays), out)


def _array_tables(arrays: Sequence[ArrayForecast]) -> Iterator[Table]:
    """Yield tables of how each array is read, first with all columns, then with fewer."""
    for is_narrow in (False, True):

        def build(paths: list[str], is_narrow: bool = is_narrow) -> Table:
            numbers = ("GiB read", "ranges", "transfers")[: 2 if is_narrow else 3]
            table = make_table("Arrays", ("array", "read strategy"), numbers, is_narrow=is_narrow)
            for path, array in zip(paths, arrays, strict=True):
                cells = (f"{array.nbytes / GIB:.2f}", str(array.ranges), str(array.transfers))
                table.add_row(Text(path), array.sharing, *cells[: len(numbers)])
            return table

        yield from with_path_ends(build, [array.path for array in arrays])
