"""Findings on a hand-written Levanter configuration, for one model, workload and slice."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardplan.config import MESH_AXES, Config
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.levanter_config.model_section import NO_MODEL_SECTION, ModelSection
from shardplan.levanter_config.trainer_section import LEVANTER_BATCH, LevanterLayout, MeshSizeError, layout_of
from shardplan.lint.checks import BLOCKING, OTHERS
from shardplan.lint.edits import Edit
from shardplan.lint.findings import ERROR, WARNING, Finding, Findings, Subject, sizes_text
from shardplan.lint.running_axes import is_of_running_model
from shardplan.model import Model, ModelAxes, inspect_model
from shardplan.plan.plan import BATCH_AXIS, MemoryPlan, Plan
from shardplan.plan.workload import workload_of
from shardplan.program.step_trace import plan_step
from shardplan.search.make_plan import model_of, plan_layout

GIANT_PART = 0.01
"""Part of a device's memory from which on a parameter is worth a finding."""
LITTLE_CUT = 4
"""A parameter cut into this many times fewer parts than there are devices is cut by far less than it could be."""
LARGEST = 3
"""Parts of memory that are named where it does not suffice."""
PARTS = [part.name for part in dataclasses.fields(MemoryPlan) if part.name not in ("peak", "available", "reserved")]


@dataclass(frozen=True)
class Target:
    """What a configuration is to be linted for."""

    config: Config
    model: Model
    axes: ModelAxes
    hardware: Slice
    written: ModelSection = NO_MODEL_SECTION
    """What the `model` section of the Levanter configuration says."""


@dataclass(frozen=True)
class Lint:
    """What there is to say of one configuration."""

    trainer: Mapping[str, Any]
    """The content of its `trainer` section, as written."""
    subject: Subject
    """The layout; where sizes of mesh axes are wrong, that with the nearest valid sizes."""
    findings: tuple[Finding, ...]
    """Errors first."""
    plan: Plan | None
    """The layout measured; None where an error leaves nothing to measure."""

    @cached_property
    def errors(self) -> list[Finding]:
        """Findings because of which it cannot run."""
        return [finding for finding in self.findings if finding.severity == ERROR]

    @property
    def needed_bytes(self) -> int:
        """Predicted peak per device; of what cannot be measured, the parameters at rest."""
        return self.plan.memory.peak if self.plan else self.subject.resting_bytes


def target_of(config: Config, written: ModelSection = NO_MODEL_SECTION) -> Target:
    """Model and slice of `config`, and its workload with what is `written` in the Levanter configuration.

    Raises:
        ConfigError: it names none, or none that is supported.
    """
    config = dataclasses.replace(config, workload=written.workload(config.workload))
    hardware = parse_slice(config.hardware.slice)
    model = model_of(config)
    return Target(config, model, inspect_model(model), hardware, written)


def lint(trainer: Mapping[str, Any], target: Target) -> Lint:
    """Everything that is found in the `trainer` section of a configuration.

    Raises:
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    layout, findings, fixed = readable(trainer, target.hardware)
    workload = layout.workload(target.config.workload)
    step = plan_step(target.model, workload_of(workload))
    backend, running = target.written.attention_backend, _running(layout, target)
    subject = Subject(fixed, layout, target.axes, workload, target.hardware, step, backend, running)
    blocking = [finding for check in BLOCKING for finding in check(subject)]
    findings += [*blocking, *(finding for check in OTHERS for finding in check(subject))]
    plan = None
    if not any(finding.severity == ERROR for finding in blocking):
        plan = _measured(subject, target)
        findings += [*_memory(subject, plan), *_giants(subject, plan)]
    return Lint(trainer, subject, tuple(sorted(findings, key=lambda f: f.severity != ERROR)), plan)


def assumptions(found: Lint, target: Target) -> list[str]:
    """What the prediction takes from shardplan's configuration, for the Levanter configuration does not say it."""
    work, written = found.subject.workload, target.written
    assumed = []
    if found.subject.layout.batch is None:
        assumed.append(f"batch {work.batch} (Levanter's default is {LEVANTER_BATCH})")
    if written.position is None:
        assumed.append(f"{work.position} tokens per sequence")
    if work.kind == "train":
        if written.gradient_checkpointing is None:
            assumed.append(f"gradient checkpointing {workload_of(work).gradient_checkpointing} (default in Levanter)")
        assumed.append(f"optimizer {work.optimizer}, whatever the section optimizer says")
    return assumed


def readable(trainer: Mapping[str, Any], hardware: Slice) -> tuple[LevanterLayout, list[Finding], Mapping[str, Any]]:
    """The layout, after every size that makes no mesh of the slice was replaced by the nearest that does.

    Raises:
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    findings: list[Finding] = []
    while True:
        try:
            return layout_of(trainer, hardware.devices, hardware.slices), findings, trainer
        except MeshSizeError as error:
            if len(findings) > len(MESH_AXES):
                raise
            trainer = Edit({error.key: error.nearest}).apply(trainer)
            findings.append(
                Finding(
                    ERROR,
                    "mesh size",
                    (error.key,),
                    str(error),
                    f"what follows is said of {error.nearest}",
                    axes=frozenset(MESH_AXES),
                )
            )


def _running(layout: LevanterLayout, target: Target) -> frozenset[str]:
    known = {*target.axes.axes, target.axes.position, BATCH_AXIS, layout.batch_axis}
    return frozenset(a for a in layout.compute_mapping if a not in known and is_of_running_model(target.model, a))


def _measured(s: Subject, target: Target) -> Plan:
    def named(mapping: Mapping[str, list[str]]) -> dict[str, list[str]]:
        return {BATCH_AXIS if axis == s.layout.batch_axis else axis: axes for axis, axes in mapping.items()}

    config = dataclasses.replace(target.config, workload=s.workload)
    compute, params = named(s.layout.compute_mapping), named(s.layout.param_mapping)
    return plan_layout(config, target.model, s.layout.mesh, compute, params)


def _memory(s: Subject, plan: Plan) -> Findings:
    memory = plan.memory
    if memory.fits:
        return
    if memory.peak <= memory.available:
        yield Finding(
            WARNING,
            "memory",
            s.mapping_keys,
            f"may not fit: {memory.peak / GIB:.2f} GiB per device of {memory.available / GIB:.2f}, and the estimate "
            f"errs by up to {memory.reserved / GIB:.2f}",
            "ask the compiler (python -m shardplan.verify --against), or cut more",
        )
        return
    parts = sorted(((getattr(memory, part), part) for part in PARTS), reverse=True)[:LARGEST]
    largest = s.bytes(s.axes.parameters)
    yield Finding(
        ERROR,
        "memory",
        s.mapping_keys,
        f"out of memory: {memory.peak / GIB:.2f} GiB per device of {memory.available / GIB:.2f}, "
        f"{(memory.peak - memory.available) / GIB:.2f} too much; the largest parts: "
        + ", ".join(f"{part.replace('_', ' ')} {amount / GIB:.2f}" for amount, part in parts if amount)
        + f"; the largest parameters: {sizes_text(largest)}",
        "cut the largest by more mesh axes, or use a larger slice, a smaller batch, or a narrower type",
        {path: largest[path] for path in list(largest)[:LARGEST]},
    )


def _giants(s: Subject, plan: Plan) -> Findings:
    """Large parameters that every device holds whole, or that are cut by far less than the devices allow."""
    least = GIANT_PART * plan.memory.available
    sizes = s.bytes(s.axes.parameters)
    giants = [p for p in s.axes.parameters if sizes[p.path] >= least and s.cut(p) * LITTLE_CUT <= s.hardware.devices]
    for whole in (True, False):
        some = [p for p in giants if (s.cut(p) == 1) == whole]
        if not some:
            continue
        held = s.bytes(some)
        cuts = sorted({s.cut(p) for p in some})
        free = [axis for axis in s.computed if axis not in s.params and any(axis in p.axes for p in some)]
        yield Finding(
            WARNING if plan.memory.peak <= plan.memory.available else ERROR,
            "replicated" if whole else "hardly cut",
            s.mapping_keys,
            (
                f"whole on each of the {s.hardware.devices} devices"
                if whole
                else f"cut into {' or '.join(map(str, cuts))} parts for {s.hardware.devices} devices"
            )
            + f": {sum(held.values()) / GIB:.2f} GiB per device, of {sizes_text(held)}",
            f"let them rest cut by more mesh axes; of their axes nothing maps {', '.join(free) or 'none'}",
            held,
        )
