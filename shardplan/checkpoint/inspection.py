"""Describes a checkpoint by its config.json, its index and the headers of its files; no weight is read.

What cannot be read, or does not match, is kept as a problem beside all that is known without it.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.checkpoint.forecast import Forecast
from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.decode_index import quantization_of
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex, read_tensor_index
from shardplan.checkpoint.mapping.unneeded import kinds_text
from shardplan.checkpoint.match import Match, is_tied, match_checkpoint
from shardplan.config.command_flags import InspectCommand
from shardplan.decoder.families import FAMILIES
from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.errors import ShardplanError
from shardplan.model.huggingface.quantization import Quantization
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import model_in_folder
from shardplan.storage import Folder, open_folder, read_bytes


@dataclass(frozen=True)
class DescribedModel:
    """The model that a config.json describes."""

    type: str
    """Model type; for a multimodal model, the type of its text model."""
    wrapper: str | None
    """Model type of the multimodal model that contains the model; None if there is none."""
    family: str | None
    """The decoder's module for this model's family; None for a user's own class."""
    parameters: int
    layers: int | None
    """Number of layers; None if a user's own class does not say."""
    expert_layers: int
    """Number of layers with routed experts."""
    experts: int | None
    """Routed experts per layer with experts."""
    experts_per_token: int | None
    positions: int
    """Number of positions of the model."""
    vocabulary: int
    is_tied: bool
    """Whether config.json ties the output head to the embedding."""


@dataclass(frozen=True)
class StoredType:
    """All stored tensors of one type, whether they are read or not."""

    dtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Files:
    """The safetensors files of a checkpoint, and what their headers list."""

    count: int
    bytes: int
    types: tuple[StoredType, ...]
    """Stored types, the type with the most bytes first."""


@dataclass(frozen=True)
class Weights:
    """The tensors that the model needs, and the tensors that it does not."""

    tensors: int
    """Number of tensors of the model, as the checkpoint divides it; codes and their scales count as one."""
    coded: int
    """Number of coded tensors among the model's tensors."""
    bytes: int
    """Stored bytes of the model's tensors, with scales and zero points."""
    ignored: int
    """Number of tensors that the model has no use for."""
    ignored_bytes: int
    ignored_kinds: str
    head: str | None
    """Name of an output head that is stored although it is tied to the embedding; a load compares the two."""
    notes: tuple[str, ...]
    """Mistakes in the index."""


@dataclass(frozen=True)
class Inspection:
    """The facts about a checkpoint that are known without reading its weights."""

    ref: str
    files: Files | None
    """The checkpoint's files; None if the index or the headers cannot be read."""
    quantization: Quantization | None
    """How config.json says that weights are stored; None for unquantized weights."""
    model: DescribedModel | None
    """The model; None if config.json cannot be read, or the model is not supported."""
    weights: Weights | None
    """The model's weights; None if the files do not match the model."""
    problem: ShardplanError | None

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values; unknown facts are null."""
        values = dataclasses.asdict(dataclasses.replace(self, problem=None))
        if self.quantization is not None:
            values["quantization"] = {
                "form": type(self.quantization).__name__, **dataclasses.asdict(self.quantization)
            }  # fmt: skip
        return {**values, "problem": None if self.problem is None else str(self.problem)}


@dataclass(frozen=True)
class InspectedCheckpoint:
    """The facts of a checkpoint, and the model and tensors from which a load is planned."""

    facts: Inspection
    model: Model | None
    match: Match | None

    def with_problem(self, problem: ShardplanError) -> "InspectedCheckpoint":
        """Return the checkpoint with `problem` recorded in its facts."""
        return dataclasses.replace(self, facts=dataclasses.replace(self.facts, problem=problem))


def inspect_checkpoint(config: InspectCommand) -> InspectedCheckpoint:
    """Read config.json, index and headers of the checkpoint `model.ref`.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = open_folder(config.model.ref)
    problems: list[ShardplanError] = []
    model = _attempt(lambda: model_in_folder(config, folder), problems)
    index = _attempt(lambda: read_tensor_index(folder), problems)
    # the configuration of a model that is not supported is not read any further
    quantization = None if model is None else _attempt(lambda: quantization_of(folder), problems)
    match = None
    if model is not None and index is not None and not problems:
        match = _attempt(lambda: match_checkpoint(model.template, index, folder.ref, quantization), problems)
    facts = Inspection(
        folder.ref,
        None if index is None else _describe_files(index),
        quantization,
        None if model is None else _describe_model(model, folder),
        None if match is None or index is None else _describe_weights(match, index),
        problems[0] if problems else None,
    )
    return InspectedCheckpoint(facts, model, match)


def _attempt[T](read: Callable[[], T], problems: list[ShardplanError]) -> T | None:
    """Call `read`; if it fails, add the reason to `problems`, and return None."""
    try:
        return read()
    except ShardplanError as error:
        problems.append(error)
        return None


def _describe_files(index: TensorIndex) -> Files:
    tensors = [*index.tensors.values(), *(tensor for _, tensor in index.rivals)]
    tensors += [tensor for name, tensor in index.single.items() if tensor is not index.tensors.get(name)]
    by_type: dict[str, list[int]] = {}
    for tensor in tensors:
        by_type.setdefault(str(tensor.dtype), []).append(tensor.nbytes)
    types = [StoredType(dtype, len(sizes), sum(sizes)) for dtype, sizes in by_type.items()]
    files = {tensor.file.name: tensor.file.size for tensor in tensors}
    return Files(len(files), sum(files.values()), tuple(sorted(types, key=lambda each: (-each.bytes, each.dtype))))


def _describe_model(model: Model, folder: Folder) -> DescribedModel:
    layers: list[Any] = []
    for segment in getattr(model.config, "segments", ()):
        layers += segment.layers * segment.repeats
    routed = [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertsConfig)]
    router = routed[0].router if routed else None
    family = FAMILIES.get(model.type)
    return DescribedModel(
        model.type,
        _wrapper_of(model, folder),
        None if family is None else family.read.__module__.rpartition(".")[2],
        inspect_model(model).size,
        len(layers) or getattr(model.config, "num_layers", None),
        len(routed),
        None if router is None else router.experts,
        None if router is None else router.experts_per_token,
        model.positions,
        model.vocab.size,
        is_tied(model.template),
    )


def _wrapper_of(model: Model, folder: Folder) -> str | None:
    """Return the type of the multimodal wrapper whose text model is `model`; None if config.json has no wrapper."""
    values = json.loads(read_bytes(folder, "config.json") or b"{}")
    outer = values.get("model_type") if isinstance(values, dict) else None
    return outer if isinstance(outer, str) and outer != model.type else None


def _describe_weights(match: Match, index: TensorIndex) -> Weights:
    # scales of activations are only in the index as it is stored
    stored: Mapping[str, Tensor] = {**index.tensors, **match.tensors}
    read = [match.tensors[name] for name in match.program.tensors]
    return Weights(
        len(read),
        sum(isinstance(tensor, CodedTensor) for tensor in read),
        sum(tensor.all_bytes for tensor in read),
        len(match.unneeded),
        sum(stored[name].all_bytes for name in match.unneeded),
        kinds_text(match.unneeded) if match.unneeded else "",
        None if match.head is None else match.head[0],
        match.notes,
    )


@dataclass(frozen=True)
class PlannedLoad:
    """Bytes per device and seconds of a planned load."""

    bandwidth: float
    """Bytes per second that one process reads."""
    processes: int
    bytes: int
    """Bytes that all processes read together."""
    seconds: float
    """Seconds until the process that reads the most has finished."""
    plan: Plan | None = None
    """The plan of the load; None without a slice, when one process reads all weights."""

    def to_json(self) -> dict[str, Any]:
        """Return `load` and `devices` as JSON values; `devices` is null without a plan."""
        load = {name: getattr(self, name) for name in ("bandwidth", "processes", "bytes", "seconds")}
        if self.plan is None:
            return {"load": load, "devices": None}
        plan, memory = self.plan, self.plan.memory
        devices = {
            "slice": plan.hardware.slice, "count": plan.hardware.devices, "mesh": plan.mesh,
            "parameters": memory.parameters, "peak": memory.peak, "available": memory.available, "fits": memory.fits,
        }  # fmt: skip
        return {"load": load, "devices": devices}


def load_by_plan(plan: Plan, forecast: Forecast) -> PlannedLoad:
    """Return the load of a plan, from the forecast of its reads.

    >>> from types import SimpleNamespace
    >>> from shardplan.checkpoint.transfer.reads.byte_ranges import ReadVolume
    >>> processes = {0: ReadVolume(8 * 10**9, 100), 1: ReadVolume(6 * 10**9, 100)}
    >>> load = load_by_plan(SimpleNamespace(mesh={"data": 8}), Forecast("gpt2", 14 * 10**9, 1e9, processes, []))
    >>> load.bytes, load.seconds
    (14000000000, 8.0)
    """
    return PlannedLoad(
        forecast.network_bandwidth, len(forecast.processes), forecast.fleet_bytes, forecast.seconds, plan
    )


def load_by_one_process(weights: Weights, bandwidth: float) -> PlannedLoad:
    """Estimate a load by one process that reads all weights at `bandwidth` bytes per second.

    >>> from types import SimpleNamespace
    >>> load_by_one_process(SimpleNamespace(bytes=14 * 10**9), bandwidth=1e9).seconds
    14.0
    """
    return PlannedLoad(bandwidth, 1, weights.bytes, weights.bytes / bandwidth)
