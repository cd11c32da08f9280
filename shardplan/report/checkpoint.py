"""Prints the facts of a checkpoint on one screen: model, stored types, ignored tensors, bytes per device."""

from rich.console import Console

from shardplan.checkpoint.inspection import DescribedModel, Files, Inspection, PlannedLoad, Weights
from shardplan.model.huggingface.quantization import (
    Awq,
    ByteCodes,
    Gptq,
    Mxfp4,
    Nvfp4,
    PackedIntegers,
    Quantization,
)
from shardplan.plan.mapping import mesh_text
from shardplan.report.page.units import gib_text, seconds_text
from shardplan.report.plan.summary import print_fit
from shardplan.report.text import LABEL_WIDTH, make_table, print_fact, print_first_fitting


def print_inspection(found: Inspection, load: PlannedLoad | None, out: Console) -> None:
    """Print the facts of a checkpoint, except its problem, which the command raises as an error.

    Args:
        load: what devices hold and how long a load takes; None if neither is known.
    """
    print_fact("checkpoint", found.ref, out)
    if found.model is not None:
        _print_model(found.model, out)
    if found.quantization is not None:
        print_fact("weights", f"{found.quantization.method}: {_form_text(found.quantization)}", out)
    if found.weights is not None:
        _print_weights(found.weights, out)
    if found.files is not None:
        _print_types(found.files, out)
    if load is not None:
        _print_load(load, out)


def _print_model(model: DescribedModel, out: Console) -> None:
    wrapper = "" if model.wrapper is None else f", the text model of a {model.wrapper}"
    family = "" if model.family is None else f" (family {model.family})"
    print_fact("model", f"{model.type}{wrapper}{family}", out)
    print_fact("parameters", f"{model.parameters:,}", out)
    experts = ""
    if model.expert_layers:
        experts = f", {model.expert_layers:,} with {model.experts} experts, {model.experts_per_token} for each token"
    if model.layers is not None:
        print_fact("layers", f"{model.layers:,}{experts}", out)
    head = "tied to the embedding" if model.is_tied else "of its own"
    print_fact("sizes", f"{model.positions:,} positions, vocabulary of {model.vocabulary:,}, output head {head}", out)


def _form_text(form: Quantization) -> str:
    """Describe how weights are stored."""
    match form:
        case ByteCodes(block=None):
            return f"{form.dtype} with scales of tensors or rows"
        case ByteCodes(block=(rows, columns)):
            return f"{form.dtype} with scales of blocks of {rows} x {columns}"
        case Mxfp4():
            return "numbers of 4 bits, 32 of which share a power of two"
        case Nvfp4():
            return "numbers of 4 bits, 16 of which share a scale"
        case PackedIntegers():
            zero = "" if form.is_symmetric else " and zero points"
            return f"integers of {form.bits} bits with scales{zero} of {_group_text(form.group, 'rows')}"
        case Awq():
            return f"integers of 4 bits with scales and zero points of {_group_text(form.group, 'columns')}"
        case Gptq():
            parts = f"scales and zero points of {_group_text(form.group, 'columns')}"
            order = ", in the order of activations" if form.has_order else ""
            return f"integers of {form.bits} bits with {parts}{order}"
        case _:
            return type(form).__name__


def _group_text(group: int | None, whole: str) -> str:
    return whole if group is None else f"groups of {group}"


def _print_weights(weights: Weights, out: Console) -> None:
    coded = f", {weights.coded:,} of them codes" if weights.coded else ""
    print_fact("read", f"{weights.tensors:,} tensors{coded}, {gib_text(weights.bytes)}", out)
    if weights.head is not None:
        print_fact("", f"{weights.head} is stored beside a tied embedding; a load compares the two", out)
    if weights.ignored:
        tensors = f"{weights.ignored:,} tensor{'' if weights.ignored == 1 else 's'}"
        print_fact("ignored", f"{tensors}, {gib_text(weights.ignored_bytes)}: {weights.ignored_kinds}", out)
    for note in weights.notes:
        print_fact("index", note, out)


def _print_types(files: Files, out: Console) -> None:
    name = f"{files.count:,} file{'' if files.count == 1 else 's'}, {gib_text(files.bytes)}"
    table = make_table(name, ("stored type",), ("tensors", "size"), is_narrow=True)
    for each in files.types:
        table.add_row(each.dtype, f"{each.tensors:,}", gib_text(each.bytes))
    print_first_fitting([table], out)


def _print_load(load: PlannedLoad, out: Console) -> None:
    plan = load.plan
    if plan is not None:
        mesh = f"{plan.hardware.devices:,} of {plan.hardware.slice}, mesh {mesh_text(plan.mesh)}"
        print_fact("devices", f"{mesh}: each holds {gib_text(plan.memory.parameters)} of parameters", out)
        print_fit(plan.memory.verdict, plan.hardware.slice, out, " " * LABEL_WIDTH)
    processes = "1 process reads" if load.processes == 1 else f"{load.processes:,} processes read"
    speed = f"{load.bandwidth / 1e9:,.3g} GB/s{' each' if load.processes > 1 else ''}"
    print_fact("load", f"{seconds_text(load.seconds)}: {processes} {gib_text(load.bytes)}, at {speed}", out)
