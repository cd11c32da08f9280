"""Lints a hand-written Levanter trainer section for one model, workload and slice."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError
from shardplan.experts.planned_model import with_own_experts
from shardplan.hardware import Slice, parse_slice
from shardplan.levanter_config.model_section import NO_MODEL_SECTION, ModelSection
from shardplan.levanter_config.trainer_section import DEFAULT_TRAIN_BATCH_SIZE, TrainerSection
from shardplan.levanter_config.training_extras import TrainingExtras
from shardplan.lint.activation_axes import is_activation_axis
from shardplan.lint.checks.memory import check_large_parameters, check_memory
from shardplan.lint.checks.section import BLOCKING, NON_BLOCKING
from shardplan.lint.checks.training import check_extras, count_extras, with_optimizer
from shardplan.lint.corrections import correct_attention_backend, parse_nearest
from shardplan.lint.findings import Finding, Severity
from shardplan.lint.subject import Subject
from shardplan.model.axes import ModelAxes
from shardplan.model.inspect import inspect_model
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.program.step_trace import plan_step
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import fit_position, model_from_config

NO_EXTRAS = TrainingExtras()


@dataclass(frozen=True)
class LintTarget:
    """The model, slice and workload that a trainer section is linted for."""

    config: PlanConfig
    model: Model
    axes: ModelAxes
    hardware: Slice
    model_section: ModelSection = NO_MODEL_SECTION
    """Content of the `model` section of the Levanter configuration."""
    extras: TrainingExtras = NO_EXTRAS
    """How the file's training differs from training all parameters with Adam."""

    @property
    def is_optimizer_given(self) -> bool:
        """Whether the user, rather than the file, names the optimizer."""
        return "workload.optimizer" in self.config.given


@dataclass(frozen=True)
class LintResult:
    """The findings on one trainer section, and its predicted cost."""

    trainer: Mapping[str, Any]
    """Content of the `trainer` section, as written."""
    subject: Subject
    """The parsed section, after the corrections of `shardplan.lint.corrections`."""
    findings: tuple[Finding, ...]
    """Findings, errors first."""
    plan: Plan | None
    """The plan with the section's mesh and mappings; None if an error makes a prediction impossible."""

    @cached_property
    def errors(self) -> list[Finding]:
        """Findings that keep the configuration from running."""
        return [finding for finding in self.findings if finding.severity == Severity.ERROR]

    @property
    def needed_bytes(self) -> int:
        """Predicted peak memory in bytes per device; without a prediction, the bytes of stored parameters."""
        return self.plan.memory.peak if self.plan else self.subject.stored_bytes


def target_of(
    config: PlanConfig,
    model_section: ModelSection = NO_MODEL_SECTION,
    extras: TrainingExtras = NO_EXTRAS,
    model: Model | None = None,
) -> LintTarget:
    """Build the model of `config`, and override the workload by the values of `model_section`.

    Args:
        model: the model; default: the model of `config`.

    Raises:
        ConfigError: `config` names no model or slice, an unsupported one, or another model than `model_section`.
    """
    levanter_model = dataclasses.replace(config.model, levanter_class=config.model.levanter_class or LEVANTER)
    workload = model_section.apply_to(config.workload)
    config = dataclasses.replace(config, model=levanter_model, workload=workload)
    hardware = parse_slice(config.hardware.slice)
    if model is not None:
        return LintTarget(config, model, inspect_model(model), hardware, model_section, extras)
    model = with_own_experts(model_from_config(config))  # which Levanter runs
    for key, size in model_section.sizes.items():
        own = getattr(model.config, key, size)
        if own != size:
            raise ConfigError(
                f"model.{key} is {size} in the file, and {own} in {config.model.config or config.model.ref}; lint the "
                "file with the model that it is for"
            )
    return LintTarget(fit_position(config, model), model, inspect_model(model), hardware, model_section, extras)


def lint_trainer(trainer: Mapping[str, Any], target: LintTarget) -> LintResult:
    """Run every check on the content of a `trainer` section.

    Raises:
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    section, findings, corrected = parse_nearest(trainer, target.hardware)
    workload = with_optimizer(section.apply_to(target.config.workload), target.extras, target.is_optimizer_given)
    # Levanter never has all logits in memory; its blocks are of the vocabulary, ours of positions
    workload = workload.with_logit_blocks(target.model.vocab.size, target.hardware.devices)
    step = plan_step(target.model, workload.resolve())
    backend, backend_findings = correct_attention_backend(target.model_section.attention_backend)
    activation_only = _activation_only(section, target)
    subject = Subject(corrected, section, target.axes, workload, target.hardware, step, backend, activation_only)
    blocking = [finding for check in BLOCKING for finding in check(subject)]
    findings += [*backend_findings, *blocking, *(finding for check in NON_BLOCKING for finding in check(subject))]
    plan = None
    if not any(finding.severity == Severity.ERROR for finding in blocking):
        plan = plan_section(subject, target)
        findings += [*check_memory(subject, plan), *check_large_parameters(subject, plan)]
    findings += check_extras(target.extras, workload, target.is_optimizer_given)
    return LintResult(trainer, subject, tuple(sorted(findings, key=lambda f: f.severity != Severity.ERROR)), plan)


def assumptions(result: LintResult, target: LintTarget) -> list[str]:
    """List the settings that the prediction takes from shardplan's configuration, because Levanter's omits them."""
    work, model_section = result.subject.workload, target.model_section
    assumed = []
    section = result.subject.section
    if section.batch is None and (work.is_training or section.eval_batch is None):
        assumed.append(f"batch {work.batch} (Levanter's default is {DEFAULT_TRAIN_BATCH_SIZE})")
    if len(section.stages) > 1:
        assumed.append(f"the step of the schedule with most sequences, {work.batch}")
    if model_section.position is None:
        assumed.append(f"{work.position} tokens per sequence")
    if work.is_training:
        if model_section.gradient_checkpointing is None:
            assumed.append(f"gradient checkpointing {work.resolve().gradient_checkpointing} (default in Levanter)")
        if target.is_optimizer_given:
            assumed.append(f"optimizer {work.optimizer}, whatever the section optimizer says")
    return assumed


def _activation_only(section: TrainerSection, target: LintTarget) -> frozenset[str]:
    known = {*target.axes.axes, target.axes.position, BATCH_AXIS, section.batch_axis}
    return frozenset(a for a in section.compute_mapping if a not in known and is_activation_axis(target.model, a))


def plan_section(subject: Subject, target: LintTarget) -> Plan:
    """Estimate a plan with the mesh and mappings of a trainer section, even if errors would keep it from running."""

    def rename_batch(mapping: Mapping[str, list[str]]) -> dict[str, list[str]]:
        return {BATCH_AXIS if axis == subject.section.batch_axis else axis: axes for axis, axes in mapping.items()}

    config = dataclasses.replace(target.config, workload=subject.workload)
    compute, params = rename_batch(subject.section.compute_mapping), rename_batch(subject.section.param_mapping)
    plan = plan_given_mappings(config, target.model, subject.section.mesh, compute, params)
    return count_extras(plan, config, target.model, target.hardware, target.extras)
