"""Prints a Plan as tables that fit the console."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.plan.file.parameters import Spec
from shardplan.plan.mapping import axes_text, mapping_text, mesh_text, shard_count
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload
from shardplan.report.plan.attention import attention_tables
from shardplan.report.plan.parameter_groups import group_parameters
from shardplan.report.plan.summary import print_estimate
from shardplan.report.text import make_table, print_bullets, print_first_fitting, print_wrapped, with_path_ends

TITLE_WIDTH = 17
"""Columns of the titles of summary lines."""
MEMORY_PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "cast_parameters": "parameters cast to the compute type",
    "gathered_weights": "weights gathered for use",
    "activations": "activations",
    "logits": "logits and loss",
}
"""Field of `MemoryPlan` -> its name, from the bottom of a chart to its top."""


def workload_text(workload: Workload) -> str:
    """Describe the workload of one step: kind, batch, dtypes and training settings."""
    return ", ".join(
        filter(
            None,
            (
                workload.kind,
                f"batch {workload.batch} x {workload.position} tokens",
                _dtypes_text(workload),
                workload.settings_text(),
            ),
        )
    )


def _dtypes_text(workload: Workload) -> str:
    """Describe the dtypes of parameters and of compute, only once if they are equal."""
    if workload.param_dtype == workload.compute_dtype:
        return workload.param_dtype
    return f"{workload.param_dtype} parameters, {workload.compute_dtype} compute"


def print_plan(plan: Plan, out: Console, with_parameters: bool = True) -> None:
    """Print the verdict, mesh, both mappings, memory by part, and the reasons.

    If layers differ in their attention, a table lists the layers and the cost of each kind.

    Args:
        with_parameters: whether to print also every parameter with its PartitionSpec, what the search rejected, and the
            YAML for Levanter.
    """
    print_estimate(plan, out)
    model, devices = plan.model, f"{plan.hardware.devices} devices of {plan.hardware.slice}"
    about = f" ({model.type}, {model.parameters:,} parameters) · {workload_text(plan.workload)}"
    print_wrapped(about, out, Text(model.name, "bold"), indent="  ")
    for title, text in (
        ("mesh", f"{mesh_text(plan.mesh)} = {devices}"),
        ("compute mapping", mapping_text(plan.compute_mapping)),
        ("param mapping", mapping_text(plan.param_mapping)),
        ("memory", _memory_text(plan)),
    ):
        print_wrapped(text, out, Text(title.ljust(TITLE_WIDTH), "bold"))
    if with_parameters:
        print_first_fitting(_parameter_tables(plan, out.width), out)
    of_attention = list(attention_tables(plan))
    if of_attention:
        print_first_fitting(of_attention, out)
    print_bullets(plan.search.reasons, out)
    if with_parameters:
        rejected = ", ".join(f"{reason} {count}" for reason, count in plan.search.rejected.items() if count)
        if rejected:
            print_bullets([f"meshes and choices that the search rejected: {rejected}"], out)
        _print_levanter_section(plan, out)


def _print_levanter_section(plan: Plan, out: Console) -> None:
    """Print the section `trainer` of a Levanter configuration that shards as the plan does."""
    out.print("\n[bold]For Levanter:[/bold]")
    # without Rich's wrapping and markup, which would change what is pasted
    out.print(trainer_yaml(plan), markup=False, highlight=False, soft_wrap=True)


def _parameter_tables(plan: Plan, width: int) -> Iterator[Table]:
    """Yield tables with the sharding and the bytes per device of every parameter, each narrower than the one before.

    Equal parameters share a row, which has their number and the bytes of all of them.

    The last tables fit `width` columns: they have the path and the PartitionSpec in one column, at its left and right
    end.
    """
    groups = group_parameters(plan.parameters)
    paths, specs = [group.path for group in groups], [spec_text(group.first.spec) for group in groups]
    shards = [str(shard_count(plan.mesh, group.first.spec)) for group in groups]
    sizes = [f"{group.bytes_per_device / 2**20:,.2f}" for group in groups]
    axes = [axes_text(group.first.axes) for group in groups]
    title, columns = "Parameters", {"shards": shards, "MiB/device": sizes}
    if len(groups) < len(plan.parameters):
        columns = {"number": [str(len(group.parameters)) for group in groups], **columns}
    numbers, cells = tuple(columns), tuple(columns.values())

    def without_axes(ends: list[str]) -> Table:
        label = title if ends == paths else f"{title} (the end of each path)"
        return _fill(make_table(label, ("parameter", "PartitionSpec"), numbers), ends, specs, *cells)

    def narrow(ends: list[str]) -> Table:
        rows = [("parameter", "PartitionSpec"), *zip(ends, specs, strict=True)]
        room = max(width - len(numbers[-1]) - 3, *(len(end) + len(spec) + 1 for end, spec in rows))
        joined, *lines = (f"{end}{spec:>{room - len(end)}}" for end, spec in rows)
        label = f"{title} (the end of each path)"
        table = make_table(label, (), (joined, numbers[-1]), is_narrow=True)
        return _fill(table, lines, sizes)

    yield _fill(make_table(title, ("parameter", "axes", "PartitionSpec"), numbers), paths, axes, specs, *cells)
    yield from with_path_ends(without_axes, paths)
    yield from with_path_ends(narrow, paths)


def _fill(table: Table, *columns: list[str]) -> Table:
    """Add the cells of every column, as plain text, and return the table."""
    for cells in zip(*columns, strict=True):
        table.add_row(*map(Text, cells))
    return table


def spec_text(spec: Spec) -> str:
    """Format a spec as JAX prints it: `P(None, 'model', ('data', 'replica'))`."""
    entries = []
    for mesh_axes in spec:
        if not mesh_axes:
            entries.append("None")
        elif len(mesh_axes) == 1:
            entries.append(repr(mesh_axes[0]))
        else:
            entries.append(f"({', '.join(map(repr, mesh_axes))})")
    return f"P({', '.join(entries)})"


def _memory_text(plan: Plan) -> str:
    """Describe a device's memory at the peak of a step by parts, without parts that would be shown as 0.00."""
    memory = plan.memory
    sizes = {label: f"{getattr(memory, part) / GIB:.2f}" for part, label in MEMORY_PARTS.items()}
    parts = " + ".join(f"{label} {size}" for label, size in sizes.items() if float(size))
    total = f"{memory.peak / GIB:.2f} GiB"
    return f"{parts} = {total}" if parts else total
