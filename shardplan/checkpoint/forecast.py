"""Forecast what every process reads when a checkpoint is loaded as planned, without starting any process."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardplan.checkpoint.adapter.adapter import read_adapter
from shardplan.checkpoint.format.codecs.decode_index import quantization_of
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import read_tensor_index
from shardplan.checkpoint.kept import with_kept_parts
from shardplan.checkpoint.load import array_specs
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram, trace_program
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.match import Match, match_checkpoint
from shardplan.checkpoint.transfer.load_plan import LoadPlan, plan_load
from shardplan.checkpoint.transfer.reads.byte_ranges import ReadVolume
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.schedule import Schedule, Speeds, read_by_process
from shardplan.checkpoint.transfer.transfer import DeviceMesh, ReadStrategy, Transfer
from shardplan.config.command_flags import CheckpointCommand
from shardplan.config.sections import LoadConfig
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice, place_mesh
from shardplan.model.dtypes.parameter_dtypes import parameter_dtypes
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.storage import open_adapter, open_folder
from shardplan.storage.folder import REMOTE


@dataclass(frozen=True)
class ArrayForecast:
    """What is read for one array of the model, summed over all processes."""

    path: str
    nbytes: int
    """Bytes read, by all processes together."""
    transfers: int
    ranges: int
    """Number of byte ranges read, by all processes together."""
    sharing: str
    """How devices read the array: "local", or the collectives that follow the reads."""


@dataclass(frozen=True)
class Forecast:
    """What a load reads according to its schedule: bytes per process and per array."""

    source: str
    """The checkpoint whose byte offsets the forecast uses."""
    checkpoint_bytes: int
    network_bandwidth: float
    """Bytes per second that one process reads."""
    processes: dict[int, ReadVolume]
    arrays: list[ArrayForecast]

    @property
    def fleet_bytes(self) -> int:
        """Bytes that all processes read together."""
        return sum(volume.bytes for volume in self.processes.values())

    @property
    def seconds(self) -> float:
        """Seconds at `network_bandwidth` until the process that reads the most has finished."""
        return max(volume.bytes for volume in self.processes.values()) / self.network_bandwidth

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON."""
        return {
            **dataclasses.asdict(self),
            "fleet_bytes": self.fleet_bytes,
            "times_read": self.fleet_bytes / self.checkpoint_bytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class _StoredModel:
    """A model's tensors, as its checkpoint stores them."""

    source: str
    program: StateDictProgram
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, including scales and other parts of codes."""
        read: set[str] = set()
        for view in self.program.views.values():
            read.update(view.tensors)
        return sum(self.tensors[name].all_bytes for name in read)


class _AssumedFile:
    """A file of unknown location that a forecast assumes and never reads."""

    name = "checkpoint"
    size, version, tuning, is_shared = 0, "", REMOTE, True

    def read_into(self, offset: int, buffer: memoryview) -> None:
        raise AssertionError(f"{self.name} is not read")

    def recorded_checksum(self) -> None:
        raise AssertionError(f"{self.name} is not read")


def forecast_reads(config: CheckpointCommand, plan: Plan, model: Model) -> Forecast:
    """Forecast what is read when `plan` loads the checkpoint `model.ref`, or one that `model.config` describes.

    Raises:
        CheckpointError: the checkpoint does not match the model, or is damaged.
        ConfigError: `load.keep_dtype` is set, and no checkpoint is named.
    """
    path = config.model.config
    stored = _read_checkpoint(config, model) if path is None else _assume_checkpoint(path, config, model)
    return _forecast(stored, plan, model, config.load)


def forecast_match(
    match: Match, plan: Plan, model: Model, load: LoadConfig, bandwidth: float | None = None
) -> Forecast:
    """Forecast what is read when `plan` loads a checkpoint whose index was read.

    Args:
        match: the checkpoint, and how its tensors make the arrays of `model`.
        bandwidth: bytes per second that a process reads; default: the network of a host of the slice.
    """
    return _forecast(_stored_model(match, model), plan, model, load, bandwidth)


def _forecast(
    stored: "_StoredModel", plan: Plan, model: Model, load: LoadConfig, bandwidth: float | None = None
) -> Forecast:
    """Schedule a load, and sum up its reads; see `forecast_match`."""
    hardware, program = parse_slice(plan.hardware.slice), stored.program
    mesh = DeviceMesh(tuple(plan.mesh.items()), tuple(place_mesh(hardware, plan.mesh).hosts()))
    dtypes = parameter_dtypes(model.template, plan.workload.param_dtype)
    specs = array_specs(model.template, plan.param_mapping, program)
    requests = {}
    for path, view in program.views.items():
        requests[path] = ArrayRequest(view, specs[path], np.dtype(jnp.dtype(dtypes[path])))
    bandwidth = bandwidth or hardware.host_network_bandwidth
    speeds = Speeds(read=bandwidth, exchange=hardware.generation.link_bandwidth)
    planned = plan_load(requests, stored.tensors, mesh, int(load.gib * GIB), hardware.is_cpu, speeds)
    arrays, processes = _summarise(planned)
    return Forecast(stored.source, stored.nbytes, bandwidth, processes, arrays)


def _read_checkpoint(config: CheckpointCommand, model: Model) -> _StoredModel:
    folder, adapter = open_folder(config.model.ref), open_adapter(config.model.adapter)
    index = read_tensor_index(folder)
    read = None if adapter is None else read_adapter(adapter)
    return _stored_model(match_checkpoint(model.template, index, folder.ref, quantization_of(folder), read), model)


def _stored_model(match: Match, model: Model) -> _StoredModel:
    views, tensors = with_kept_parts(model.template, match.program.views, match.tensors, match.where)
    return _StoredModel(match.where, dataclasses.replace(match.program, views=views), tensors)


def _assume_checkpoint(config_path: str, config: CheckpointCommand, model: Model) -> _StoredModel:
    """Lay out the tensors of a config.json's model in one assumed file, in the dtype that config.json names."""
    if model.kept is not None:
        raise ConfigError(
            "load.keep_dtype reads codes and scales where a checkpoint has them, and model.config names none; name it "
            "with model.ref, or leave load.keep_dtype out"
        )
    program = trace_program(model.template)
    config_json = read_config(config_path, None, config.model_class)
    dtype = np.dtype(jnp.dtype(config_json.get("torch_dtype") or config_json.get("dtype") or "bfloat16"))
    sizes = (math.prod(shape) * dtype.itemsize for shape in program.tensors.values())
    offsets = itertools.accumulate(sizes, initial=0)
    file = _AssumedFile()
    tensors = {
        name: Tensor(file, offset, shape, dtype)
        for (name, shape), offset in zip(program.tensors.items(), offsets, strict=False)
    }
    return _StoredModel(f"one file with the tensors of {config_path} in {dtype}", program, tensors)


def _summarise(planned: LoadPlan) -> tuple[list[ArrayForecast], dict[int, ReadVolume]]:
    """Sum up the reads of a schedule by array and by process; scales count as reads of their array."""
    schedule = planned.schedule
    by_path: defaultdict[str, list[Transfer]] = defaultdict(list)
    for transfer in schedule.transfers:
        by_path[transfer.path].append(transfer)
    processes = dict.fromkeys(schedule.mesh.devices_by_process, ReadVolume())
    totals: dict[str, ReadVolume] = {}
    for path, transfers in by_path.items():
        of_array = Schedule(schedule.mesh, tuple(transfers))
        volumes = read_by_process(of_array, planned.in_transit, planned.sources)
        factor = _bytes_with_parts(planned.in_transit[path].view, planned.tensors)
        for process, volume in volumes.items():
            processes[process] += ReadVolume(round(volume.bytes * factor), volume.count)
        total = sum(volumes.values(), ReadVolume())
        totals[path] = ReadVolume(round(total.bytes * factor), total.count)
    arrays = []
    owned = {request.codes.scales for request in planned.requests.values() if request.codes is not None}
    for path, transfers in by_path.items():
        if path in owned:
            continue
        total, codes = totals[path], planned.requests[path].codes
        if codes is not None:
            total += totals[codes.scales]
        strategy = _strategy_text(transfers[0].strategy)
        arrays.append(ArrayForecast(path, total.bytes, len(transfers), total.count, strategy))
    return arrays, processes


def _bytes_with_parts(view: View, tensors: Mapping[str, Tensor]) -> float:
    """Return (bytes of codes, scales and other parts) / (bytes of codes)."""
    read = [tensors[name] for name in view.tensors]
    return sum(tensor.all_bytes for tensor in read) / max(1, sum(tensor.nbytes for tensor in read))


def _strategy_text(strategy: ReadStrategy) -> str:
    if not strategy.collectives:
        return "local"
    resharded = [f"all-to-all over {axis}" for _, axes in strategy.all_to_all for axis in axes]
    return ", ".join([*resharded, *(f"all-gather over {axis}" for axis in strategy.all_gather)])
