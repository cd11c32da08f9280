"""What loading a checkpoint as planned will read, process by process, before any process runs."""

import dataclasses
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardplan.checkpoint.load import array_specs, validated
from shardplan.checkpoint.mapping.program import trace_program
from shardplan.checkpoint.transfer.schedule import (
    Fleet,
    Ranges,
    Schedule,
    Sharing,
    Source,
    Speeds,
    Transfer,
    in_stored_order,
    make_schedule,
    read_by_process,
)
from shardplan.checkpoint.transfer.stream import transfer_limits, travelling
from shardplan.config import Config
from shardplan.hardware import GIB, Slice, parse_slice, place_mesh
from shardplan.model import Model, read_config
from shardplan.plan.plan import Plan
from shardplan.storage import open_folder


@dataclass(frozen=True)
class ArrayForecast:
    """One array of the model."""

    path: str
    nbytes: int
    """Read by the fleet."""
    transfers: int
    ranges: int
    """Of all processes."""
    sharing: str
    """How devices read it."""


@dataclass(frozen=True)
class Forecast:
    """The read schedule of a plan in numbers."""

    source: str
    """What the offsets are of."""
    checkpoint_bytes: int
    network_bandwidth: float
    """Bytes per second that a process can read at most."""
    processes: dict[int, Ranges]
    arrays: list[ArrayForecast]

    @property
    def fleet_bytes(self) -> int:
        """What all processes read together."""
        return sum(ranges.bytes for ranges in self.processes.values())

    @property
    def seconds(self) -> float:
        """At the speed of the network: until the process that reads most is through."""
        return max(ranges.bytes for ranges in self.processes.values()) / self.network_bandwidth

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **dataclasses.asdict(self),
            "fleet_bytes": self.fleet_bytes,
            "times_read": self.fleet_bytes / self.checkpoint_bytes,
            "seconds": self.seconds,
        }


def forecast(config: Config, plan: Plan, model: Model) -> Forecast:
    """What loading as `plan` says reads: of the checkpoint `model.ref`, or of one such as its config.json describes.

    Raises:
        CheckpointError: the checkpoint does not hold the model, or is damaged.
    """
    hardware = parse_slice(plan.hardware.slice)
    if config.model.config is None:
        folder = open_folder(config.model.ref)
        tensors, program = validated(model.template, folder)
        source, sizes = folder.ref, {name: tensor.nbytes for name, tensor in tensors.items()}
        types = {name: tensor.dtype for name, tensor in tensors.items()}
        places = {name: (tensor.file.name, tensor.offset) for name, tensor in tensors.items()}
    else:
        program = trace_program(model.template)
        said = read_config(config.model.config, None)
        stored = np.dtype(jnp.dtype(said.get("torch_dtype") or said.get("dtype") or "bfloat16"))
        source = f"one file with the tensors of {config.model.config} in {stored}"
        types = dict.fromkeys(program.tensors, stored)
        sizes = {name: math.prod(shape) * stored.itemsize for name, shape in program.tensors.items()}
        offsets = itertools.accumulate(sizes.values(), initial=0)
        places = {name: ("checkpoint", offset) for name, offset in zip(sizes, offsets, strict=False)}
    wanted = np.dtype(jnp.dtype(plan.workload.param_dtype))
    _, views, specs = in_stored_order(program.views, array_specs(model.template, plan.param_mapping, program))
    sources = {name: Source(*places[name], types[name].itemsize) for name in program.tensors}
    fleet = Fleet(tuple(plan.mesh.items()), tuple(place_mesh(hardware, plan.mesh).hosts()))
    bandwidth = _network_bandwidth(hardware)
    itemsizes = {path: travelling(view, types, wanted).itemsize for path, view in views.items()}
    limits = transfer_limits(int(config.load.gib * GIB), hardware.is_cpu)
    speeds = Speeds(read=bandwidth, exchange=hardware.generation.link_bandwidth)
    schedule = make_schedule(views, sources, specs, itemsizes, fleet, limits, speeds)
    by_path: defaultdict[str, list[Transfer]] = defaultdict(list)
    for transfer in schedule.transfers:
        by_path[transfer.path].append(transfer)
    total = dict.fromkeys(fleet.by_process, Ranges())
    arrays = []
    for path, transfers in by_path.items():
        read = read_by_process(Schedule(fleet, tuple(transfers)), views, sources)
        total = {process: total[process] + ranges for process, ranges in read.items()}
        of_all = sum(read.values(), Ranges())
        arrays.append(ArrayForecast(path, of_all.bytes, len(transfers), of_all.count, _way(transfers[0].sharing)))
    return Forecast(source, sum(sizes[name] for name in program.tensors), bandwidth, total, arrays)


def _network_bandwidth(hardware: Slice) -> float:
    """Bytes per second of all network cards of a host."""
    chips = math.prod(min(n, host) for n, host in zip(hardware.torus, hardware.generation.host_chips, strict=False))
    return hardware.generation.network_bandwidth * chips


def _way(sharing: Sharing) -> str:
    if not sharing.steps:
        return "each its own"
    moved = [f"all-to-all over {axis}" for _, axes in sharing.moved for axis in axes]
    return ", ".join([*moved, *(f"all-gather over {axis}" for axis in sharing.gathered)])
