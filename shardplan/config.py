"""The configuration of every command: dataclasses, YAML files and command-line overrides.

Imports no JAX, so that `--help` and every complaint about a configuration are instant.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
import yaml
from draccus.utils import deflatten
from draccus.wrappers.docstring import get_attribute_docstring

from shardplan.errors import ConfigError, nearest, one_line

DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("eval", "prefill", "train")
PROGRAMS = ("load", "step")
OPTIONS = ("auto", "plan")
FORMATS = ("hf", "levanter")
CHECKPOINTING = ("auto", "default", "nested", "offload", "recompute", "save_all")
LEAST_LOAD_GIB = 0.0625
CONFIG_FLAGS = ("--config", "--config_path")


NO_KEY = "no key"
"""Marks a field of the configuration that nobody sets."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model."""

    ref: str = ""
    """Hugging Face checkpoint: a local folder, org/model@revision, gs://, s3://, az:// or https:// folder."""
    config: str | None = None
    """A config.json to plan from when the checkpoint itself is not at hand; default: the one of `ref`."""


@dataclass(frozen=True)
class HardwareConfig:
    """Where it runs."""

    slice: str = "cpu-8"
    """A TPU slice such as v4-256, v4:4x4x8 (by its torus), 2xv6e-256 (two slices), or cpu-N for virtual CPU devices."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; an axis left out is chosen by the planner."""

    replica: int | None = None
    data: int | None = None
    model: int | None = None


MESH_AXES = tuple(item.name for item in dataclasses.fields(MeshConfig))
"""Axes of a plan's mesh, major to minor."""


@dataclass(frozen=True)
class WorkloadConfig:
    """What one step does."""

    kind: str = "eval"
    """What the plan is for: eval, train or prefill."""
    batch: int = 8
    """Sequences per step, over all devices."""
    position: int = 2048
    """Tokens per sequence."""
    param_dtype: str = "bfloat16"
    """Type the parameters are kept in: bfloat16, float16 or float32."""
    compute_dtype: str = "bfloat16"
    """Type activations and matrix products are computed in."""
    gradient_checkpointing: str = "default"
    """Which activations training keeps, as Levanter names it: default, recompute, nested, offload or save_all; auto for
    the fastest that fits, offload left out."""
    microbatches: int | None = 1
    """Parts of the batch that a training step takes one after the other, adding up their gradients; null for the
    number that is fastest and fits."""
    optimizer: str = "adamw"
    """What trains, as optax names it: adamw, lion, adafactor, sgd, ..."""


@dataclass(frozen=True)
class DataConfig:
    """What text is evaluated."""

    path: str | None = None
    """A .jsonl file with a `text` and optionally an `id` per line, or a .txt file (one document)."""
    max_documents: int | None = None
    """Evaluate only the first this many documents."""


@dataclass(frozen=True)
class CompilerConfig:
    """How the TPU compiler is asked."""

    program: str = "step"
    """What is compiled: step (that of workload.kind), or load (the assembly of Levanter's loader)."""
    jobs: int | None = None
    """Compiles at a time; default: one per processor."""
    seconds: int = 1200
    """Time limit of one compile."""
    gib: float = 16.0
    """Memory limit of one compile, GiB of this machine."""
    cache: str | None = "~/.cache/shardplan/verify"
    """Folder of verdicts, by plan and versions; null for none."""


@dataclass(frozen=True)
class LoadConfig:
    """How a checkpoint is loaded."""

    gib: float = 2.0
    """Most host memory of a process beside the model, GiB."""


@dataclass(frozen=True)
class Config:
    """Configuration of every command of shardplan."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    plan: str | None = None
    """A Plan written with --json, to use instead of planning again."""
    pin: tuple[str, ...] = ()
    """What the plan must keep: mlp=model, params.embed=replica+data (at rest), position= (whole), or of one tensor
    q_proj.weight:kv_head=model,embed=data."""
    forbid: tuple[str, ...] = ()
    """What the plan must not do: experts (cut at all), or mlp=replica, params.vocab=data."""
    why: tuple[str, ...] = ()
    """Of plan: choices, written like pins, to say why the plan does not make them."""
    what_if: bool = False
    """Of plan: also plan for other batches, slices, types, checkpointing and microbatches, and print what each would
    change."""
    verify: int | bool = False
    """Have the TPU compiler check the plan before going on; needs no TPU. Of plan also a number: so many of the best
    plans are compiled, and the one that the compiler finds fastest is taken."""
    options: str = "plan"
    """Of verify: compiler options, plan (those of the plan) or auto (curated ones, and which of them help)."""
    against: tuple[str, ...] = ()
    """Of verify: Plans, configurations, or Levanter configurations to rank beside this one."""
    lint: str | None = None
    """Of plan: a Levanter configuration whose hand-written trainer section is to be checked and repaired."""
    schedule: bool = False
    """Of checkpoint: print which process reads what of the checkpoint, and how long that takes; needs no weights."""
    checksum: bool = False
    """Of eval and checkpoint convert: compare the checkpoint's files with what their store has on record, while they
    are read."""
    output: str = "results/eval.json"
    """Where eval writes its results."""
    to: str | None = None
    """Of checkpoint convert: the folder to write, local, gs://, s3:// or az://."""
    format: str = "hf"
    """Of checkpoint convert: hf (safetensors, as transformers reads them) or levanter (its tensorstore checkpoint)."""
    dry_run: bool = False
    """Print the plan and stop: needs no accelerator, and no weights beyond config.json."""
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False, metadata={NO_KEY: True})
    """Keys that a file or the command line set, by dotted name; itself none."""
    json: str | None = None
    """Write the Plan (of verify: the verdicts) as JSON to this path, or to stdout with `-`."""

    def __post_init__(self) -> None:
        for key, value, least in (
            ("workload.batch", self.workload.batch, 1),
            ("workload.position", self.workload.position, 2),  # a single token predicts nothing
            ("workload.microbatches", self.workload.microbatches, 1),
            ("mesh.replica", self.mesh.replica, 1),
            ("mesh.data", self.mesh.data, 1),
            ("mesh.model", self.mesh.model, 1),
            ("data.max_documents", self.data.max_documents, 1),
            ("compiler.jobs", self.compiler.jobs, 1),
            ("compiler.seconds", self.compiler.seconds, 1),
            ("compiler.gib", self.compiler.gib, 1),
            ("load.gib", self.load.gib, LEAST_LOAD_GIB),
            ("verify", int(self.verify), 0),
        ):
            if value is not None and not value >= least:
                raise ConfigError(f"{key} is {value}; it must be at least {least}")
        for key, name, valid in (
            ("workload.param_dtype", self.workload.param_dtype, DTYPES),
            ("workload.compute_dtype", self.workload.compute_dtype, DTYPES),
            ("workload.kind", self.workload.kind, KINDS),
            ("workload.gradient_checkpointing", self.workload.gradient_checkpointing, CHECKPOINTING),
            ("compiler.program", self.compiler.program, PROGRAMS),
            ("options", self.options, OPTIONS),
            ("format", self.format, FORMATS),
        ):
            if name not in valid:
                raise ConfigError(f"{key} is {name!r}; {nearest(name, valid)}")
        batch, parts = self.workload.batch, self.workload.microbatches
        is_given = self.plan is not None  # what the plan says is not known here
        if not is_given and self.workload.kind == "train" and parts is not None and batch % parts:
            near = min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: abs(n - parts))
            raise ConfigError(f"workload.microbatches {parts} does not divide workload.batch {batch}; use {near}")
        if not is_given and self.workload.kind != "train" and parts not in (None, 1):
            raise ConfigError(f"workload.microbatches is {parts}: only training has them; set workload.kind to train")
        if not self.model.ref and not self.model.config and self.plan is None:
            raise ConfigError("no model: set model.ref to a Hugging Face folder, or model.config to a config.json")


@dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    default: Any
    documentation: str
    kinds: tuple[type, ...]
    """Types its value may have."""


KIND_NAMES = {
    int: "an integer", float: "a number", str: "text", bool: "true or false", tuple: "a list of texts",
    type(None): "null",
}  # fmt: skip


def _keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Key]]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if NO_KEY in item.metadata:
            continue
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from _keys(typing.cast(type, kind), f"{prefix}{item.name}.")
        else:
            documentation = get_attribute_docstring(cls, item.name).docstring_below
            union = typing.get_args(kind) if typing.get_origin(kind) is not tuple else (tuple,)
            yield f"{prefix}{item.name}", Key(item.default, documentation, union or (kind,))


KEYS = dict(_keys(Config))
"""Every key of the configuration, by dotted name."""


def load(argv: Sequence[str], prog: str) -> Config:
    """The configuration that the command line `argv` describes.

    `--config FILE` may be given several times (later files win, key by key), in the forms `--config x`,
    `--config=x` and `--config_path x`; every other `--a.b value` overrides one key, with `-` for `_` where one likes.
    `--model x` is `--model.config x` of a config.json, else `--model.ref x`.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, or a value of the wrong type.
        SystemExit: after printing help.
    """
    if "-h" in argv or "--help" in argv:
        print(_help(prog))
        raise SystemExit(0)
    files, overrides = _split(argv)
    values: dict[str, Any] = {}
    for path in files:
        values.update(_checked(leaves(_read(path)), where=path))
    values.update(_checked(overrides, where="command line"))
    config: Config = draccus.decode(Config, deflatten(values, sep="."))
    return dataclasses.replace(config, given=frozenset(values))


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Config files, and dotted overrides with their values; a flag without a value means true."""
    files: list[str] = []
    overrides: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise ConfigError(f"unexpected argument {token!r}; options look like --workload.batch 16")
        flag, separator, text = token.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        has_value = bool(separator) or bool(rest and not rest[0].startswith("--"))
        if has_value and not separator:
            text = rest.pop(0)
        if name == "model" and has_value:
            name = "model.config" if text.endswith(".json") else "model.ref"
        if name in KEYS and tuple in KEYS[name].kinds:
            if not has_value:
                raise ConfigError(f"{flag} needs at least one value")
            overrides.setdefault(name, []).append(text)
            while rest and not rest[0].startswith("--"):
                overrides[name].append(rest.pop(0))
            continue
        if flag in CONFIG_FLAGS and has_value:
            files.append(text)
        elif flag in CONFIG_FLAGS:
            raise ConfigError(f"{flag} needs the path of a YAML file")
        else:
            overrides[name] = _parsed(name, text) if has_value else True
    return files, overrides


def _parsed(name: str, text: str) -> Any:
    """The value that `text` on the command line means for the key `name`: for a text, itself."""
    kinds = KEYS[name].kinds if name in KEYS else ()
    if str in kinds:
        return None if type(None) in kinds and text in ("null", "") else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = [str(found) for folder in {Path(path).parent, Path("configs")} for found in folder.glob("*.yaml")]
        raise ConfigError(f"config file {path} does not exist; {nearest(path, others)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path} is not YAML: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} holds {type(loaded).__name__}, not a mapping of keys")
    return loaded


def leaves(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested sections."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            found.update(leaves(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` unchanged, after comparing every key, and the type of every value, with `KEYS`."""
    for name, value in values.items():
        if name not in KEYS and any(key.startswith(f"{name}.") for key in KEYS):
            raise ConfigError(f"{where}: {name} is a section, not a value; set a key in it")
        if name not in KEYS:
            raise ConfigError(f"{where}: unknown key {name!r}; {nearest(name, KEYS)}")
        # Exactly these types: True is an int in Python, and a number in a YAML file was not meant as a path.
        kinds = KEYS[name].kinds
        is_texts = tuple in kinds and isinstance(value, list) and all(isinstance(item, str) for item in value)
        is_whole = float in kinds and type(value) is int
        if type(value) not in kinds and not is_texts and not is_whole:
            wanted = " or ".join(KIND_NAMES[kind] for kind in kinds)
            raise ConfigError(f"{where}: {name} is {value!r}; it must be {wanted}")
    return values


def _help(prog: str) -> str:
    parser = argparse.ArgumentParser(
        prog=prog, description=Config.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; several are merged, later ones win")
    for name, key in KEYS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", default=key.default, help=key.documentation)
    return parser.format_help()
