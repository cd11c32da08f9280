"""The configuration of planning, which the configurations of all commands extend."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from shardplan.config.keys import NO_KEY
from shardplan.config.sections import CompilerConfig, HardwareConfig, LoadConfig, MeshConfig, ModelConfig
from shardplan.errors import ConfigError
from shardplan.model.model_class import LEVANTER
from shardplan.plan.serialization import flatten
from shardplan.plan.workload.token_counts import parse_token_range
from shardplan.plan.workload.workload import AUTO_BATCH, AUTO_POSITION, Workload, raise_first

SHARED_KEYS = (
    "hardware", "mesh", "workload", "pin", "forbid", "step_tokens", "load", "checksum", "task", "tracker", "gate",
    "deadline", "verify", "precision_study", "expert_statistics", "selection_statistics",
)  # fmt: skip
"""Sections and keys whose values must be equal in all processes of a run."""


@dataclass(frozen=True)
class PlanConfig:
    """A model, a slice, a mesh and a workload to plan for, and constraints on the plan."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    workload: Workload = field(default_factory=Workload)
    load: LoadConfig = field(default_factory=LoadConfig)
    plan: str | None = None
    """A Plan file written with --json, to use instead of planning again."""
    pin: tuple[str, ...] = ()
    """Required mappings: mlp=model, params.embed=replica+data (stored parameters), position= (replicated), or of one
    tensor q_proj.weight:kv_head=model,embed=data."""
    forbid: tuple[str, ...] = ()
    """Forbidden shardings: vocab, params.vocab (as stored), or mlp=replica."""
    step_tokens: str | None = None
    """For batch auto: fewest and most tokens of a step, as 4M-16M; needed to train."""
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False, metadata={NO_KEY: True})
    """Dotted names of the keys that a file or the command line set; not a configuration key itself."""
    files: tuple[str, ...] = field(default=(), repr=False, compare=False, metadata={NO_KEY: True})
    """The YAML files that were read; not a configuration key itself."""
    takes_ref: ClassVar[bool] = False
    """Whether an argument without a flag names the checkpoint, `model.ref`."""
    has_levanter_keys: ClassVar[bool] = False
    """Whether Levanter's own sections and keys are passed through; see `shardplan.config.levanter_keys`."""
    own_defaults: ClassVar[Mapping[str, Any]] = {}
    """Dotted key -> default of this command, where it differs from its section's default."""

    @property
    def model_class(self) -> str | None:
        """The class that computes the model, see `shardplan.model.model_class`; None for shardplan's decoder."""
        return self.model.levanter_class or (LEVANTER if self.workload.is_training else None)

    def __post_init__(self) -> None:
        work = self.workload
        if work.position == AUTO_POSITION and work.window is not None:
            from shardplan.plan.workload.packing import packed_length  # imports numpy

            object.__setattr__(self, "workload", replace(work, position=packed_length(work.window)))
        elif work.position == AUTO_POSITION and not self.makes_windows:
            raise ConfigError("workload.position auto is the length that packed windows fill best; set workload.window")
        raise_first(self.workload.problems())
        if self.step_tokens is not None:
            parse_token_range("step_tokens", self.step_tokens)
            if work.batch != AUTO_BATCH:
                raise ConfigError(
                    f"step_tokens is for workload.batch auto, and the batch is {work.batch}; leave it out"
                )
        if self.load.keep_dtype and work.is_training:
            raise ConfigError(
                f"load.keep_dtype is for evaluation, and workload.kind is {work.kind}, which updates weights; leave it "
                "out"
            )
        if self.plan is None:  # a given plan decides these values
            raise_first(self.workload.microbatch_problems())
            if not self.model.ref and not self.model.config and not self.has_other_model:
                raise ConfigError(
                    "no model: name one with --model, or set model.ref to a Hugging Face folder, or model.config to a "
                    "config.json"
                )

    @property
    def facts(self) -> dict[str, str]:
        """Key -> value of the settings that decide programs and weights, which must be equal in all processes.

        Paths may differ between hosts; the content of files is compared when they are read.
        """
        keys = flatten(asdict(self))
        return {name: str(value) for name, value in keys.items() if name.partition(".")[0] in SHARED_KEYS}

    @property
    def has_other_model(self) -> bool:
        """Whether another file, read later, may name the model."""
        return False

    @property
    def makes_windows(self) -> bool:
        """Whether the windows, and their length, are determined after the configuration is read."""
        return self.plan is not None


@dataclass(frozen=True)
class CompilingConfig(PlanConfig):
    """The configuration of planning and compiling."""

    compiler: CompilerConfig = field(default_factory=CompilerConfig)


@dataclass(frozen=True)
class ReportingConfig(CompilingConfig):
    """The configuration of planning, and of the report page."""

    report: str | None = None
    """Write a page that shows the plan to this path: one HTML file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is not None and not self.report.endswith(".html"):
            raise ConfigError(f"report is {self.report!r}; it must be a file that ends in .html")


@dataclass(frozen=True)
class LoadingConfig(PlanConfig):
    """The configuration of planning, and of loading the checkpoint."""

    checksum: bool = False
    """Compare the checkpoint's files with the checksums of their store."""
