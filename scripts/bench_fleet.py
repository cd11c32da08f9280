"""python scripts/bench_fleet.py [--output docs/benchmarks/fleet.md]

Plans the load of Llama 3.1 405B as one process of a fleet does it, and has a hub answer all processes of the fleet. No
process is started: a schedule is arithmetic, and the hub a state machine that takes the time as an argument.
"""

import math
import os
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from bench_page import page_parser, write_page

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.format.shared_index import DeferredFile, pack_index, unpack_index
from shardplan.checkpoint.load import array_specs
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.checkpoint.match import match_checkpoint
from shardplan.checkpoint.transfer.load_plan import plan_load
from shardplan.checkpoint.transfer.reads.byte_ranges import ReadVolume, find_byte_ranges, sum_ranges
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.schedule import MAX_REREAD_BYTES, read_by_process
from shardplan.checkpoint.transfer.stream import DEFAULT_BUDGET
from shardplan.checkpoint.transfer.transfer import DeviceMesh
from shardplan.hardware import parse_slice, place_mesh
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.runtime.processes.hub.hub import Hub
from shardplan.runtime.processes.hub.messages import MessageKind, decode, encode
from shardplan.runtime.processes.timing import TIMING
from shardplan.runtime.processes.watch.activity import Activity
from shardplan.storage import open_folder
from shardplan.storage.folder import REMOTE

MODEL, FILES = "llama-3.1-405b", 191
MAPPING = {"embed": "data", "mlp": "model", "vocab": "model", "kv_head": "model"}
FLEETS = {
    "v4-512": {"replica": 1, "data": 32, "model": 8},
    "v4-8192": {"replica": 1, "data": 512, "model": 8},
    "16xv5e-256": {"replica": 1, "data": 512, "model": 8},
    "8xv4-8192": {"replica": 8, "data": 512, "model": 8},
    "128xv5e-256": {"replica": 1, "data": 4096, "model": 8},
}
"""Slice -> mesh."""
COMMAND = "python scripts/bench_fleet.py --output docs/benchmarks/fleet.md"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model, in as many files as on the Hugging Face hub."""

    model: Model
    tensors: dict[str, Tensor]


def make_checkpoint() -> Checkpoint:
    """Describe a checkpoint that no file exists of."""
    model = build_model(read_config(MODEL, None), 4096)
    shapes = expected_tensors(model.template)
    ends = [8] * FILES
    tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        number = i * FILES // len(shapes)
        file = DeferredFile(open_folder("."), f"model-{number:05}.safetensors", 2**40, f"{number:032x}", REMOTE)
        tensors[name] = Tensor(file, ends[number], shape, np.dtype("bfloat16"))
        ends[number] += tensors[name].nbytes
    return Checkpoint(model, tensors)


def plan_part(checkpoint: Checkpoint, packed: str, mesh: DeviceMesh, process: int) -> ReadVolume:
    """Do what one process does before its first read, except for its messages; returns what it will read."""
    index = unpack_index(open_folder("."), packed)
    tensors, program = index.tensors, match_checkpoint(checkpoint.model.template, index, MODEL).program
    specs = array_specs(checkpoint.model.template, MAPPING, program)
    requests = {}
    for path, view in program.views.items():
        requests[path] = ArrayRequest(view, specs[path], np.dtype("bfloat16"))
    plan = plan_load(requests, tensors, mesh, DEFAULT_BUDGET, zero_copy=False)
    volumes = read_by_process(plan.schedule, plan.in_transit, plan.sources)
    total = sum(volume.bytes for volume in volumes.values())
    # every byte once, but for arrays that are quicker read again than sent
    assert 0 <= total - sum(tensor.nbytes for tensor in tensors.values()) <= MAX_REREAD_BYTES * len(requests)
    own = ReadVolume()
    for transfer in plan.schedule.transfers:
        own += sum_ranges(find_byte_ranges(transfer, plan.in_transit[transfer.path].view, plan.sources, mesh, process))
    return own


class HubOfFleet:
    """A hub, and the processes that send it messages; what it takes and returns is encoded, as on a network."""

    def __init__(self, count: int):
        self.count, self.now = count, 0.0
        self.hub = Hub(count, 60.0, self.now, lambda: "jax:1")
        self.replies = 0

    def send(self, messages: Iterable[tuple[int, MessageKind, dict[str, Any]]]) -> float:
        """Send messages of processes; returns the seconds of computing that the hub needs for them."""
        lines = [(process, encode(kind, **values)) for process, kind, values in messages]
        started = time.process_time()
        for process, line in lines:
            message = decode(line)
            assert message is not None
            replies = self.hub.receive(process, message, self.now)
            self.replies += len(replies)
            for kind, values in {id(values): (kind, values) for _, kind, values in replies}.values():
                encode(kind, **values)
        return time.process_time() - started

    def from_all(self, kind: MessageKind, values: Callable[[int], dict[str, Any]]) -> float:
        """Send a message of every process; returns the seconds of the hub."""
        return self.send((process, kind, values(process)) for process in range(self.count))

    def meet(self) -> float:
        """Have all processes come."""
        facts = {f"workload.key_{i}": "a value" for i in range(60)}
        return self.from_all(
            MessageKind.HELLO,
            lambda i: {"index": i, "count": self.count, "host": f"host-{i}", "pid": i, "facts": facts},
        ) + self.from_all(MessageKind.ENTER, lambda i: {"is_end": False})

    def agree(self) -> float:
        """Have all processes agree on the versions of the files of a checkpoint."""
        parts = {f"model-{i:05}-of-{FILES:05}.safetensors": f"{i:064x}" for i in range(FILES)}
        return self.from_all(MessageKind.AGREE, lambda i: {"name": "checkpoint", "parts": parts, "problem": None})

    def broadcast(self, text: str) -> float:
        """Have process 0 send a text to all, which wait for it."""
        return self.from_all(MessageKind.BROADCAST, lambda i: {"name": "headers", **({} if i else {"value": text})})

    def beat(self, seconds: float) -> float:
        """Have all processes give signs of life for a while; returns the seconds of the hub, with its looks at them."""
        activity, used = Activity("loading", 3).report(), 0.0
        for beat in range(round(seconds / TIMING.beat_s)):
            used += self.from_all(MessageKind.BEAT, lambda i, done=beat: {"activity": {**activity, "done": i + done}})
            for _ in range(round(TIMING.beat_s / TIMING.tick_s)):
                self.now += TIMING.tick_s
                started = time.process_time()
                assert all(reply.kind is MessageKind.ALIVE for reply in self.hub.tick(self.now))
                used += time.process_time() - started
        return used

    def end(self) -> float:
        """Have all processes end."""
        used = self.from_all(MessageKind.LEAVE, lambda i: {"problem": None})
        started = time.process_time()
        for process in range(self.count):
            assert self.hub.close(process, self.now) == []
        return used + time.process_time() - started


def measure(checkpoint: Checkpoint, packed: str, name: str) -> list[str]:
    """Return a line of the table."""
    placed = tuple(place_mesh(parse_slice(name), FLEETS[name]).hosts())
    mesh = DeviceMesh(tuple(FLEETS[name].items()), placed)
    count = len(mesh.devices_by_process)
    seconds = []
    for process in (0, count // 2, count - 1):
        mesh = DeviceMesh(mesh.axes, placed)
        started = time.process_time()
        volume = plan_part(checkpoint, packed, mesh, process)
        seconds.append(time.process_time() - started)
    tracemalloc.start()
    plan_part(checkpoint, packed, DeviceMesh(mesh.axes, placed), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    fleet = HubOfFleet(count)
    beats_for = 20.0
    hub = [fleet.meet(), fleet.agree(), fleet.broadcast(packed), fleet.beat(beats_for) / beats_for, fleet.end()]
    return [
        name, f"{count:,}", f"{sorted(seconds)[1]:.2f}", f"{peak / 2**20:.0f}", f"{volume.bytes / 2**20:,.0f}",
        *(f"{used:.2f}" for used in hub[:3]), f"{hub[3]:.1%}", f"{hub[4]:.2f}",
    ]  # fmt: skip


def main() -> None:
    arguments = page_parser(__doc__).parse_args()
    checkpoint = make_checkpoint()
    packed = pack_index(TensorIndex(checkpoint.tensors))
    size = sum(math.prod(tensor.shape) * 2 for tensor in checkpoint.tensors.values())
    lines = [
        "# Fleets of thousands of processes",
        "",
        f"```\n{COMMAND}\n```",
        "",
        f"What one process of a fleet does to load Llama 3.1 405B ({size / 2**30:,.0f} GiB in {FILES} files) before it",
        "reads: it takes the index from process 0, matches it with the model, and makes the schedule. Peak memory is",
        "that of Python and numpy beyond what was there before. The hub is one process beside process 0; its times are",
        "those of its processor, without the kernel's part of sending and receiving.",
        "",
        "| slice | processes | planning a process's part, s | peak memory, MiB | it reads, MiB "
        "| hub: all meet, s | all agree on the files, s | index to all, s | signs of life, part of a core "
        "| all end, s |",
        f"|{'---|' + '---:|' * 9}",
        *(f"| {' | '.join(measure(checkpoint, packed, name))} |" for name in FLEETS),
        "",
        f"The index is sent as {len(packed) / 2**10:.0f} KiB to each process.",
    ]
    write_page("\n".join(lines) + "\n", arguments.output)


if __name__ == "__main__":
    main()
