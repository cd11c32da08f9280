"""Prints a Plan, and the results of an evaluation, as tables; never truncated when piped."""

from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardplan.hardware import GIB
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.plan.mapping import mapping_text, mesh_text
from shardplan.plan.plan import ParameterPlan, Plan, Spec
from shardplan.plan.workload import Workload

PIPED_WIDTH = 240
"""Columns if the output is no terminal: room for the longest row, so that lines can be searched."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process with exit code 1; a reader such as `head` that stops early is no failure
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """A console on `stream`, wide enough that nothing is truncated when it is piped."""
    return _Console(file=stream, width=None if stream.isatty() else PIPED_WIDTH)


def workload_text(workload: Workload) -> str:
    """The workload of one step in words: kind, batch, dtypes and training settings."""
    return ", ".join(
        filter(
            None,
            (
                workload.kind,
                f"batch {workload.batch} x {workload.position} tokens",
                f"{workload.param_dtype} parameters",
                f"{workload.compute_dtype} compute",
                workload.training_text(),
            ),
        )
    )


def print_plan(plan: Plan, out: Console) -> None:
    """Print mesh, both mappings, every parameter, memory by part, the verdict with reasons, and Levanter's YAML."""
    hardware = plan.hardware
    out.print(
        f"[bold]{escape(plan.model.name)}[/bold] ({plan.model.type}, {plan.model.parameters:,} parameters) · "
        + workload_text(plan.workload),
        soft_wrap=True,
    )
    mesh = mesh_text(plan.mesh)
    out.print(f"[bold]mesh[/bold]             {mesh} = {hardware.devices} devices of {hardware.slice}", soft_wrap=True)
    out.print(f"[bold]compute mapping[/bold]  {mapping_text(plan.compute_mapping)}", soft_wrap=True)
    out.print(f"[bold]param mapping[/bold]    {mapping_text(plan.param_mapping)}", soft_wrap=True)
    out.print(_parameter_table(plan))
    out.print(_memory_table(plan))
    memory, free = plan.memory, plan.memory.available - plan.memory.peak
    verdict, rest = "[bold green]fits[/bold green]", "free"
    if not memory.fits:
        verdict, free = "[bold red]does not fit[/bold red]", memory.usable - memory.peak
        rest = f"short ({memory.reserved / GIB:.2f} reserved for the error of the estimate)"
    out.print(
        f"{verdict} {hardware.slice}: {memory.peak / GIB:.2f} of {hardware.hbm_gib:.2f} GiB per device, "
        f"{abs(free) / GIB:.2f} GiB {rest}; a step takes about {plan.cost.step_seconds:.3g} s",
        soft_wrap=True,
    )
    for reason in plan.search.reasons:
        out.print(f"  · {reason}", soft_wrap=True)
    rejected = ", ".join(f"{reason} {count}" for reason, count in plan.search.rejected.items())
    out.print(
        f"  · planned in {plan.search.seconds:.2f} s; excluded: {rejected}",
        soft_wrap=True,
    )
    out.print("\n[bold]For Levanter:[/bold]")
    out.print(trainer_yaml(plan), markup=False, highlight=False, soft_wrap=True)


def _parameter_table(plan: Plan) -> Table:
    """Return a table with the axes, sharding and bytes per device of every parameter."""
    table = Table(title="Parameters", title_justify="left", header_style="bold")
    for column in ("parameter", "axes", "PartitionSpec"):
        table.add_column(column, overflow="fold")
    for column in ("shards", "MiB/device"):
        table.add_column(column, justify="right", no_wrap=True)
    for parameter in plan.parameters:
        table.add_row(
            parameter.path,
            ", ".join(f"{axis} {size}" for axis, size in parameter.axes.items()),
            spec_text(parameter.spec),
            str(_shard_count(parameter, plan.mesh)),
            f"{parameter.bytes_per_device / 2**20:,.2f}",
        )
    return table


def spec_text(spec: Spec) -> str:
    """A spec as JAX prints it: `P(None, 'model', ('data', 'replica'))`."""
    entries = []
    for mesh_axes in spec:
        if not mesh_axes:
            entries.append("None")
        elif len(mesh_axes) == 1:
            entries.append(repr(mesh_axes[0]))
        else:
            entries.append(f"({', '.join(map(repr, mesh_axes))})")
    return f"P({', '.join(entries)})"


def _shard_count(parameter: ParameterPlan, mesh: dict[str, int]) -> int:
    """Number of different shards of the parameter."""
    count = 1
    for mesh_axes in parameter.spec:
        for axis in mesh_axes or ():
            count *= mesh[axis]
    return count


def _memory_table(plan: Plan) -> Table:
    """Return a table of the parts of the memory of a device; parts of 0 bytes are left out."""
    memory = plan.memory
    table = Table(title="Memory per device", title_justify="left", header_style="bold")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    table.add_column("of available", justify="right")
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "parameters cast to the compute type": memory.cast_parameters,
        "weights gathered for use": memory.gathered_weights,
        "activations of a layer": memory.activations,
        "logits and loss (after the layers)": memory.logits,
        "peak": memory.peak,
        "available": memory.available,
    }
    for label, amount in rows.items():
        if amount:
            table.add_row(label, f"{amount / GIB:.3f}", f"{amount / memory.available:.1%}")
    return table


def print_results(results: dict[str, Any], out: Console) -> None:
    """Print a row per document and the totals of an evaluation (see `shardplan.eval.results`)."""
    table = Table(title="Documents", title_justify="left", header_style="bold")
    table.add_column("document", overflow="fold")
    for column in ("tokens", "bytes", "loss/token", "perplexity", "bits/byte"):
        table.add_column(column, justify="right")
    for row in results["documents"]:
        table.add_row(
            escape(row["id"]),
            f"{row['tokens']:,}",
            f"{row['bytes']:,}",
            _number(row["loss_per_token"], 4),
            _number(row["perplexity"], 2),
            _number(row["bits_per_byte"], 4),
        )
    out.print(table)
    total, load = results["total"], results["load"]
    speed = total["tokens_per_second"]
    out.print(
        f"[bold]loss per token {_number(total['loss_per_token'], 4)}[/bold] nats, unigram "
        f"{total['unigram_loss_per_token']:.4f}; perplexity {_number(total['perplexity'], 2)}, bits per byte "
        f"{_number(total['bits_per_byte'], 4)}, {total['tokens']:,} tokens, "
        + (f"{speed:,.0f} tokens/s" if speed else "speed not measured (a single step, which compiled)"),
        soft_wrap=True,
    )
    out.print(f"loaded {load['bytes'] / GIB:.3f} GiB in {load['seconds']:.2f} s", soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
