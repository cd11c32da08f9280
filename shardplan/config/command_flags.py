"""The keys and flags of each command: the planning keys that all commands share, and the command's own keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from shardplan.config.keys import NO_KEY
from shardplan.config.plan_config import CompilingConfig, LoadingConfig, PlanConfig, ReportingConfig
from shardplan.config.sections import (
    DataConfig,
    DeadlineConfig,
    EvaluationKind,
    GateConfig,
    LaunchConfig,
    LoadConfig,
    Target,
    TaskConfig,
    TrackerSection,
    check_minimum,
)
from shardplan.errors import ConfigError
from shardplan.plan.workload.token_counts import parse_token_count


class OptionSets(StrEnum):
    """The sets of compiler options that `verify` compiles with."""

    PLAN = "plan"
    """The options of the plan."""
    AUTO = "auto"
    """Curated sets of options, to find out which of them help."""


class Format(StrEnum):
    """Format of a checkpoint that convert writes."""

    HF = "hf"
    """safetensors, as transformers reads them."""
    LEVANTER = "levanter"
    """Levanter's tensorstore checkpoint."""
    ORBAX = "orbax"
    """Orbax's sharded checkpoint, in the layout of MaxText's parameters."""


@dataclass(frozen=True)
class PlanCommand(ReportingConfig):
    """Print the fastest plan that fits, and why; needs no accelerator and no weights."""

    why: tuple[str, ...] = ()
    """Choices, written like pins; prints for each why the plan does not make it."""
    what_if: bool = False
    """Also plan for other batches, slices, types, checkpointing and microbatches, and print what each would change."""
    verify: int | bool = False
    """Have the TPU compiler check the plan; needs no TPU. A number N has it compile the N best plans by estimate, and
    takes the one that it finds fastest."""
    lint: str | None = None
    """A Levanter configuration whose hand-written trainer section is checked and repaired."""
    lint_seconds: int = 60
    """With lint: time limit of the search for edits, in seconds."""
    rank_slices: tuple[str, ...] = ()
    """Slices (v6e-8, 2xv6e-256) to plan for and to rank by tokens/s per chip; a generation (v4, v5p, ..., or all)
    stands for all its named slices."""
    price: tuple[str, ...] = ()
    """For rank_slices: prices of a chip-hour in any currency, as v6e=2.70; ranks by cost: of a training step, for other
    workloads of a million tokens."""
    token_budget: str | None = None
    """For rank_slices: tokens of a whole run, as 15T; adds the days of the run, and with price its cost."""
    list_slices: bool = False
    """Only print the slices of every generation; needs no model."""
    parameters: bool = False
    """Also print every parameter with its PartitionSpec, and the section `trainer` for Levanter."""
    json: str | None = None
    """Write the Plan (or the findings, the ranking or the slices) as JSON to this path, or to stdout with `-`."""
    verdicts: str | None = None
    """Verdicts that `verify --json` wrote, to be shown in the report."""

    @property
    def has_other_model(self) -> bool:
        """Whether a Levanter configuration may describe the model instead."""
        return self.lint is not None

    def __post_init__(self) -> None:
        if not self.list_slices:
            super().__post_init__()
        check_minimum("verify", int(self.verify), 0)
        check_minimum("lint_seconds", self.lint_seconds, 0)
        for name in ("price", "token_budget"):
            if getattr(self, name) and not self.rank_slices:
                raise ConfigError(f"{name} is for ranking slices; name some with --rank_slices, or leave {name} out")
        if self.token_budget is not None:
            parse_token_count("token_budget", self.token_budget)
        if self.lint is not None and self.load.keep_dtype:
            raise ConfigError("load.keep_dtype is for plans of shardplan, and lint checks Levanter's; leave it out")
        if self.list_slices and self.report is not None:
            raise ConfigError("list_slices plans nothing; leave report out")
        if self.verdicts is not None and self.report is None:
            raise ConfigError("verdicts are shown in a report; name its file with --report, or leave verdicts out")


@dataclass(frozen=True)
class VerifyCommand(ReportingConfig):
    """Have the TPU compiler judge the plan, on a machine without a TPU."""

    options: OptionSets = OptionSets.PLAN
    """Compiler options: plan (those of the plan) or auto (curated sets, and which of them help)."""
    against: tuple[str, ...] = ()
    """Plans, configurations, or Levanter configurations to rank beside this one."""
    json: str | None = None
    """Write the verdicts as JSON to this path, or to stdout with `-`."""


@dataclass(frozen=True)
class WatchConfig:
    """How a run is watched."""

    tracker: TrackerSection = field(default_factory=TrackerSection)
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    profile: str | None = None
    """Write a trace of a few steps, for xprof, to this folder."""
    profile_all: bool = False
    """Have every process write a trace, not only process 0."""


@dataclass(frozen=True)
class MonitoringConfig(WatchConfig):
    """How an evaluation is watched."""

    expert_statistics: bool = False
    """Measure how evenly experts are used, by layer, for summary.json and report."""


@dataclass(frozen=True)
class EvalCommand(MonitoringConfig, LoadingConfig, ReportingConfig):
    """Plan, stream the checkpoint into the plan, evaluate text, and write the results."""

    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    verify: bool = False
    """Have the TPU compiler check the plan before anything is loaded."""
    output: str = "results/eval"
    """Results folder, the same for all hosts; runs resume from it."""
    precision_study: int | None = None
    """For extraction: score so many windows in bfloat16 and in float32, and compare."""
    dry_run: bool = False
    """Print the plan and stop: needs no accelerator, and no weights beyond config.json."""
    json: str | None = None
    """Write the Plan as JSON to this path, or to stdout with `-`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum("precision_study", self.precision_study, 1)
        if self.precision_study is not None and self.task.kind is not EvaluationKind.EXTRACTION:
            raise ConfigError("precision_study compares windows of extraction; set task.kind to that")
        if self.precision_study is not None and self.plan is not None:
            raise ConfigError("precision_study plans for both types; leave plan out")
        if self.precision_study is not None and self.json is not None:
            raise ConfigError("precision_study has two plans; leave json out: each summary.json has its own")
        if self.precision_study is not None and self.report is not None:
            raise ConfigError("precision_study has two plans; leave report out")

    @property
    def makes_windows(self) -> bool:
        """Whether the windows, and their length, are determined after the configuration is read."""
        return self.task.kind is EvaluationKind.EXTRACTION or self.plan is not None


@dataclass(frozen=True)
class LaunchCommand(EvalCommand):
    """Print what starts eval on every host of the slice, for a launcher; needs no accelerator and no weights."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    to: Target | None = None
    """The launcher: gcloud, queued, xpk, skypilot, slurm or ray."""


@dataclass(frozen=True)
class TrainCommand(WatchConfig, ReportingConfig):
    """Plan, and run Levanter's training with the plan; the same command resumes it.

    A file may have Levanter's own sections trainer, optimizer, data and adapter, and the other keys of its train_lm;
    they are set on the command line by the same names, such as --trainer.num_train_steps 1000.
    """

    verify: bool = False
    """Have the TPU compiler check the plan before anything is loaded."""
    output: str = "results/train"
    """Folder of checkpoints and records, the same for all hosts; an interrupted run resumes from it."""
    selection_statistics: bool = False
    """For native sparse attention: measure which blocks are selected, by layer, for the tracker, run.json and
    report."""
    dry_run: bool = False
    """Write plan.json and levanter.yaml to the output folder and stop: needs no accelerator and no weights."""
    json: str | None = None
    """Write the Plan as JSON to this path, or to stdout with `-`."""
    levanter: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata={NO_KEY: True})
    """Levanter's keys by dotted name; not a configuration key itself."""
    has_levanter_keys: ClassVar[bool] = True
    own_defaults: ClassVar[Mapping[str, Any]] = {"workload.kind": "train"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.adapter is not None:
            raise ConfigError("model.adapter is for evaluation; to train a LoRA adapter, set Levanter's adapter.type")
        if self.load != LoadConfig():
            raise ConfigError("the section load is for evaluation, and Levanter's training loads weights by itself")
        if self.tracker.kind is not None and any(name.startswith("trainer.tracker") for name in self.levanter):
            raise ConfigError("tracker and trainer.tracker both say where metrics go; leave one of them out")

    @property
    def facts(self) -> dict[str, str]:
        """Key -> value of the settings that must be equal in all processes, including Levanter's keys."""
        return {**super().facts, **{name: str(value) for name, value in self.levanter.items()}}


@dataclass(frozen=True)
class LaunchTrainCommand(TrainCommand):
    """Print what starts train on every host of the slice, for a launcher; needs no accelerator and no weights."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    to: Target | None = None
    """The launcher: gcloud, queued, xpk, skypilot, slurm or ray."""


@dataclass(frozen=True)
class CheckpointCommand(PlanConfig):
    """Print the bytes of the checkpoint that each process reads, and how long it takes; needs no weights."""

    schedule: bool = False
    """Print the read schedule."""
    json: str | None = None
    """Write the schedule as JSON to this path, or to stdout with `-`."""


PLANNING = ("hardware", "mesh", "workload", "pin", "forbid")
"""Sections and keys; setting any of them makes `checkpoint inspect` plan the load."""


@dataclass(frozen=True)
class InspectCommand(PlanConfig):
    """Print the facts of a checkpoint: model, stored types, ignored tensors, and with a slice the bytes per device."""

    load: LoadConfig = field(default_factory=LoadConfig)
    bandwidth: float | None = None
    """GB/s that one process reads; default: the network of a host, if a slice is named."""
    json: str | None = None
    """Write the printed facts as JSON to this path, or to stdout with `-`."""
    takes_ref: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ConfigError(f"bandwidth is {self.bandwidth}; it must be a positive number of GB/s")

    @property
    def has_other_model(self) -> bool:
        """Whether the model may be named elsewhere; always True, because this command itself requires a checkpoint."""
        return True

    @property
    def is_planned(self) -> bool:
        """Whether the configuration names a Plan, a slice or anything else to plan for."""
        return self.plan is not None or any(name.partition(".")[0] in PLANNING for name in self.given)


@dataclass(frozen=True)
class ConvertCommand(LoadingConfig):
    """Load the checkpoint as planned, and write it in another format, dtype or location."""

    to: str | None = None
    """The folder to write, local, gs://, s3:// or az://."""
    format: Format = Format.HF
    """hf (safetensors, as transformers reads them), levanter (its tensorstore checkpoint) or orbax (a sharded one that
    Orbax restores)."""
    dry_run: bool = False
    """Print the plan and stop."""
    json: str | None = None
    """With --dry_run: write the Plan as JSON to this path, or to stdout with `-`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load.keep_dtype:
            raise ConfigError("load.keep_dtype is for evaluation, and convert writes numbers; leave it out")


@dataclass(frozen=True)
class DoctorCommand(CompilingConfig):
    """Find in seconds what would make a run on this host fail, before it is started; needs no configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    output: str = "results/eval"
    """Folder of the results."""
    json: str | None = None
    """Write the findings as JSON to this path, or to stdout with `-`."""

    def __post_init__(self) -> None:
        if self.model.ref or self.model.config or self.plan:
            super().__post_init__()

    @property
    def makes_windows(self) -> bool:
        """Whether the windows are determined later; always True, because this command plans nothing."""
        return True


COMMANDS: dict[str, type[PlanConfig]] = {
    "plan": PlanCommand,
    "verify": VerifyCommand,
    "eval": EvalCommand,
    "train": TrainCommand,
    "launch": LaunchCommand,
    "launch train": LaunchTrainCommand,
    "checkpoint": CheckpointCommand,
    "checkpoint inspect": InspectCommand,
    "checkpoint convert": ConvertCommand,
    "doctor": DoctorCommand,
}
"""Command name -> class of its configuration."""
