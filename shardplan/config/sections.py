"""The sections of a configuration that commands share. Imports no JAX."""

import re
from dataclasses import dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from shardplan.config.keys import MEANING
from shardplan.errors import ConfigError
from shardplan.hardware import MAX_HOST_GIB, parse_slice
from shardplan.hardware.mesh_axes import ROWS
from shardplan.model.axes import MAX_SIZE
from shardplan.plan.workload.workload import MAX_TEMPERATURE, MIN_TEMPERATURE, temperature_problem

MIN_LOAD_GIB = 0.0625
JOB_NAME = "[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
"""Pattern for a job name that Google Cloud, Kubernetes and xpk all accept."""


class CompiledProgram(StrEnum):
    """The program that verify compiles."""

    STEP = "step"
    """The step of the workload."""
    LOAD = "load"
    """Levanter's own assembly of the loaded model."""


@dataclass(frozen=True)
class ModelConfig:
    """The model, its weights and its adapter."""

    ref: str = ""
    """Hugging Face checkpoint: folder, org/model@revision, gs://, s3://, az://, https://."""
    config: str | None = None
    """A config.json or bundled model (llama-3.1-8b) to plan from; default: model.ref's."""
    levanter_class: str | None = None
    """The Levanter configuration class of your own model, as package.module:Class, or `levanter` for Levanter's own
    class for the model_type of the config.json; default: shardplan's decoder, and for training `levanter`."""
    adapter: str | None = None
    """LoRA adapter of PEFT, added to weights while they are read; named like model.ref."""


@dataclass(frozen=True)
class HardwareConfig:
    """The devices: a slice of TPUs, or virtual CPU devices."""

    slice: str = "cpu-8"
    """A TPU slice such as v4-256, v4:4x4x8 (by its torus), 2xv6e-256 (two slices), or cpu-N for virtual CPU devices."""
    host_gib: float | None = None
    """Host GiB per device for activations; default: three quarters of the host's memory, at most 128."""

    def __post_init__(self) -> None:
        parse_slice(self.slice)  # raises: a misspelt slice is reported before anything is imported or planned
        check_minimum("hardware.host_gib", self.host_gib, 0)
        if self.host_gib is not None and self.host_gib > MAX_HOST_GIB:
            raise ConfigError(
                f"hardware.host_gib is {self.host_gib}; the TPU compiler gives a device at most {MAX_HOST_GIB} GiB of "
                "its host's memory"
            )


def _check_mesh(mesh: Any) -> None:
    for item in fields(mesh):
        check_minimum(f"mesh.{item.name}", getattr(mesh, item.name), 1)


if TYPE_CHECKING:

    class MeshConfig:
        """Sizes of the mesh axes; the planner chooses every size that is left out."""

        def __init__(self, **sizes: int | None) -> None: ...

else:
    MeshConfig = make_dataclass(
        "MeshConfig",
        [(row.name, int | None, field(default=None, metadata={MEANING: row.meaning})) for row in ROWS],
        namespace={
            "__doc__": "Sizes of the mesh axes; the planner chooses every size that is left out.",
            "__post_init__": _check_mesh,
        },
        frozen=True,
        module=__name__,
    )


@dataclass(frozen=True)
class DataConfig:
    """The texts of an evaluation."""

    path: str | None = None
    """Texts, local, gs://, s3://, az:// or https://: .txt (one text); .jsonl, .jsonl.gz, .jsonl.zst or .parquet (a
    `text` in each row, perhaps an `id`); or a folder."""
    max_documents: int | None = None
    """Maximum number of texts to evaluate, from the first on."""

    def __post_init__(self) -> None:
        check_minimum("data.max_documents", self.max_documents, 1)


class EvaluationKind(StrEnum):
    """The kinds of evaluations."""

    LOSS = "loss"
    """The loss of every text."""
    EXTRACTION = "extraction"
    """The probability of the second part of every window of the texts, given the first."""


class StrideUnit(StrEnum):
    """The unit of the stride of windows."""

    TOKENS = "tokens"
    """The text is encoded once, and a window starts every `stride` tokens."""
    CHARACTERS = "characters"
    """A window starts every `stride` characters, and is encoded by itself."""


@dataclass(frozen=True)
class TaskConfig:
    """The kind of the evaluation, and its windows."""

    kind: EvaluationKind = EvaluationKind.LOSS
    """loss (of every text), or extraction (how probable its windows are)."""
    prefix: int = 50
    """For extraction: tokens of a window that are given."""
    suffix: int = 50
    """For extraction: tokens of a window whose probability is measured."""
    stride: int | None = None
    """Distance between the starts of two windows. Default: 5 for extraction; for loss workload.position - 1, which
    computes nothing twice."""
    stride_unit: StrideUnit = StrideUnit.TOKENS
    """For extraction: tokens or characters."""
    top_k: int = 40
    """For extraction: also report top-k sampling with this k; 0 to omit it."""
    temperature: float = 1.0
    """For extraction: sampling is from softmax(logits / temperature)."""
    special_tokens: bool | None = None
    """Whether the tokenizer's special tokens, such as the beginning token, are added: for loss to every text (default:
    true), for extraction to every window (default: false)."""
    bos_in_prefix: bool = False
    """For extraction: whether windows begin with BOS, as one of the prefix tokens."""
    shard: int | None = None
    """Windows whose results are written together, the most that a killed run loses; default: 4096 for extraction, 256
    for loss."""

    def __post_init__(self) -> None:
        for key, minimum in (("prefix", 1), ("suffix", 1), ("stride", 1), ("top_k", 0), ("shard", 1)):
            check_minimum(f"task.{key}", getattr(self, key), minimum)
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:  # also if it is no number
            raise ConfigError(temperature_problem("task.temperature", self.temperature))
        if self.bos_in_prefix and self.special_tokens is False:
            raise ConfigError("task.bos_in_prefix is true, and task.special_tokens false; leave one of them out")
        for key, default in (("temperature", 1.0), ("bos_in_prefix", False)):
            if self.kind is not EvaluationKind.EXTRACTION and getattr(self, key) != default:
                raise ConfigError(
                    f"task.{key} is for task.kind extraction, and the kind is {self.kind}; leave it out, or set "
                    "task.kind to extraction"
                )

    @property
    def begins_windows(self) -> bool:
        """Whether every window of an extraction begins with the tokenizer's beginning-of-sequence token."""
        return bool(self.special_tokens) or self.bos_in_prefix

    @property
    def window_tokens(self) -> int:
        """Tokens per window of an extraction, including the beginning-of-sequence token."""
        return self.prefix + self.suffix + (self.begins_windows and not self.bos_in_prefix)


class TrackerKind(StrEnum):
    """A tracker of Levanter."""

    JSON = "json"
    """Lines of JSON in metrics.jsonl, in the results folder."""
    WANDB = "wandb"
    """Weights & Biases."""
    TENSORBOARD = "tensorboard"
    """Files of TensorBoard in the results folder."""


@dataclass(frozen=True)
class TrackerSection:
    """Where rate, MFU and progress of a run are tracked."""

    kind: TrackerKind | None = None
    """json, wandb or tensorboard; default: none."""
    project: str | None = "shardplan"
    """For wandb: the project."""
    name: str | None = None
    """For wandb and tensorboard: the name of the run."""


@dataclass(frozen=True)
class DeadlineConfig:
    """After how many seconds without progress a run counts as stuck."""

    loading: float = 600.0
    """While planning, tokenizing, or reading the checkpoint."""
    compiling: float = 3600.0
    """While the program of a step is compiled."""
    step: float | None = None
    """During a step; default: 30 times the predicted seconds, at least 300."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check_minimum(f"deadline.{item.name}", getattr(self, item.name), 1)


@dataclass(frozen=True)
class GateConfig:
    """What happens if a run is slower than its plan."""

    factor: float | None = None
    """Least measured / planned speed, after warm-up; default: 0.3 on TPUs, 0 on CPUs."""
    stop: bool = False
    """Stop a slower run with exit code 7; by default only warn."""

    def __post_init__(self) -> None:
        check_minimum("gate.factor", self.factor, 0)


@dataclass(frozen=True)
class CompilerConfig:
    """How the TPU compiler is run."""

    program: CompiledProgram = CompiledProgram.STEP
    """What to compile: step (of workload.kind), or load (Levanter's)."""
    jobs: int | None = None
    """Compiles at a time; default: one per processor."""
    seconds: int = 1200
    """Time limit of one compile."""
    gib: float = 16.0
    """Memory limit of one compile, GiB of this machine."""
    cache: str | None = "~/.cache/shardplan/verify"
    """Folder that caches verdicts; null for none."""
    memory_only: bool = False
    """Judge only memory and collectives, in seconds, without the time of a step."""

    def __post_init__(self) -> None:
        for key in ("jobs", "seconds", "gib"):
            check_minimum(f"compiler.{key}", getattr(self, key), 1)


@dataclass(frozen=True)
class LoadConfig:
    """How a checkpoint is loaded."""

    gib: float = 2.0
    """Maximum host memory of a process beyond the model, GiB."""
    strict: bool = False
    """Refuse tensors that the model has no use for; a warning names them otherwise."""
    keep_dtype: bool = False
    """Keep weights in fp8 on the devices if the checkpoint stores them so."""

    def __post_init__(self) -> None:
        check_minimum("load.gib", self.gib, MIN_LOAD_GIB)


class Target(StrEnum):
    """A launcher that launch writes a script or manifest for."""

    GCLOUD = "gcloud"
    """A TPU VM, and its hosts through ssh."""
    QUEUED = "queued"
    """Queued resources: TPU VMs that are requested in a queue, of one or several slices."""
    XPK = "xpk"
    """A workload of a Kubernetes cluster (GKE)."""
    SKYPILOT = "skypilot"
    """A task of SkyPilot."""
    SLURM = "slurm"
    """A batch script of Slurm."""
    RAY = "ray"
    """A Python program that starts tasks of a Ray cluster."""


@dataclass(frozen=True)
class LaunchConfig:
    """How the processes of an evaluation are started on their hosts."""

    name: str = "shardplan"
    """Name of the job."""
    zone: str | None = None
    """For gcloud, queued, xpk and skypilot: the zone of the slice, such as us-east5-b."""
    cluster: str | None = None
    """For xpk: the Kubernetes cluster."""
    image: str | None = None
    """For xpk: the container image, in which shardplan is installed."""
    setup: str = ""
    """Shell commands that every host runs first, to install shardplan or to activate its environment."""
    environment: tuple[str, ...] = ()
    """Variables for the processes, as NAME=value; they are readable in what is printed."""
    logs: str = "logs"
    """For gcloud, queued and slurm: folder of the logs, one file per host."""
    hosts: int | None = None
    """For slurm and ray: hosts that share the virtual devices of a cpu slice; default: 1. TPU slices have their own."""

    def __post_init__(self) -> None:
        check_minimum("launch.hosts", self.hosts, 1)
        if not re.fullmatch(JOB_NAME, self.name):
            raise ConfigError(
                f"launch.name is {self.name!r}; it must begin with a letter, and be at most 40 lower-case letters, "
                "digits and hyphens, for example 'my-job-2'"
            )
        for text in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*=.*", text, re.ASCII | re.DOTALL):
                raise ConfigError(f"launch.environment has {text!r}; write NAME=value, for example 'HF_HOME=/data/hf'")


def check_minimum(key: str, value: float | None, minimum: float) -> None:
    """Check that an optional size is at least `minimum` and at most `MAX_SIZE`.

    Raises:
        ConfigError: the value is out of range, or is not a number.
    """
    if value is not None and not minimum <= value <= MAX_SIZE:
        limit = f"at most {MAX_SIZE}" if value > MAX_SIZE else f"at least {minimum}"
        raise ConfigError(f"{key} is {value}; it must be {limit}")
