"""A modelled step time from a scheduled module: the compiler's cycles, and transfers that hide behind them or do not.

Each computation is played once in its schedule: an instruction takes its estimated cycles, a synchronous collective
waits for its bytes, an asynchronous one occupies its links from its start and is waited for at its end. Loops take
their body's time as often as they run.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.hardware import Slice
from shardplan.verify.hlo.collectives import KINDS, Network, Transfer, base_opcode, is_collective, short_op
from shardplan.verify.hlo.module import Computation, HloError, Instruction, Known, Module

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "iota", "add-dependency", "domain",
}  # fmt: skip
"""Opcodes that take no time: names of things."""
FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "MoveToDevice", "MoveToHost")
"""Custom calls that do nothing by themselves."""
FLOATS = ("bf16", "f16", "f32")
NO_CYCLES = " without cycles, timed as reading and writing its result"
KERNEL_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Products of position x position x head size in splash attention's kernels (q k^T and p v; the gradients)."""
SMALL_BYTES = 2**20
"""Moving less than this takes a microsecond, which is not worth telling."""
COPIES = ("copy-start", "slice-start")
"""Opcodes that start a copy between HBM and the memory of the core, which runs beside it."""
HBM = frozenset({"hbm"})
"""The link that those copies take."""
ASYNC_CALLS = ("async-start", "call-start")
"""Opcodes that start a computation beside the core; it may be a collective, on the sparse cores too."""


@dataclass(frozen=True)
class Use:
    """A collective with the number of times a step executes it."""

    transfer: Transfer
    form: str
    """sync, async, or windowed: a permute in the loop of a decomposed product."""
    count: int


@dataclass
class Timing:
    """What one step is made of."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    """Time that the core works; the rest of `seconds` it waits for transfers."""
    kernel_seconds: float = 0.0
    """The part of `compute_seconds` that is modelled from FLOPs, for want of cycles."""
    uses: list[Use] = field(default_factory=list)
    op_seconds: dict[str, float] = field(default_factory=dict)
    """Operation of the traced program -> time of the core in it."""
    not_understood: Counter[str] = field(default_factory=Counter)
    """What has been left out -> how many times it stands in the module."""


def model_step(module: Module, network: Network, hardware: Slice, causal: float) -> Timing:
    """Play the module's schedule.

    Args:
        causal: the part of the blocks of position x position that attention kernels compute.

    Raises:
        HloError: the module is not what this reader expects.
    """
    player = _Player(module, network, hardware, causal)
    try:
        player.timing.seconds = player.play(module.entry, [], 1, "")
    except (KeyError, IndexError, ValueError) as error:
        raise HloError(f"not a module as this reader knows it: {error!r}") from error
    return player.timing


class _Schedule:
    """One execution of a computation: the core's time, and what is under way beside it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.links: defaultdict[str, float] = defaultdict(float)
        """Link -> when it is free."""
        self.arrival: dict[str, float] = {}
        """What was started (the name of an instruction, or of a transfer in fusions) -> when it is there."""

    def start(self, name: str, seconds: float, links: Iterable[str]) -> None:
        """Begin something beside the core, as soon as all its links are free."""
        begin = max([self.now, *(self.links[link] for link in links)])
        self.arrival[name] = begin + seconds
        self.links.update(dict.fromkeys(links, begin + seconds))

    def wait(self, name: str) -> None:
        """Let the core wait for what was started under this name, if anything was."""
        self.now = max(self.now, self.arrival.get(name, self.now))


@dataclass(frozen=True)
class _Fused:
    """A collective in a fusion."""

    first: bool
    """Whether no earlier fusion of the computation has it."""
    last: bool
    holder: Computation
    instruction: Instruction


class _Player:
    def __init__(self, module: Module, network: Network, hardware: Slice, causal: float) -> None:
        self.module, self.network, self.hardware, self.causal = module, network, hardware, causal
        self.timing = Timing()
        self.flying: set[str] = set()
        """Collectives in fusions that have begun and not ended."""

    def play(self, computation: Computation, parameters: Sequence[Known], times: int, context: str) -> float:
        """Seconds of one execution of `computation`, which happens `times` times in a step."""
        schedule = _Schedule()
        fused = self._fused_transfers(computation)
        for instruction in computation.instructions.values():
            op = instruction.op_name or context
            try:
                if instruction.opcode == "while":
                    schedule.now += self._loop(computation, instruction, parameters, times, op)
                elif instruction.opcode in ("call", "conditional"):
                    schedule.now += self._call(computation, instruction, parameters, times, op)
                else:
                    self._step(computation, instruction, fused.get(instruction.name, {}), times, op, schedule)
            except HloError as error:
                self.timing.not_understood[f"{instruction.opcode}: {error}"] += 1
        return schedule.now

    def _step(
        self,
        computation: Computation,
        instruction: Instruction,
        fused: Mapping[str, _Fused],
        times: int,
        op: str,
        schedule: _Schedule,
    ) -> None:
        """Execute one instruction that is no control flow; `fused`: the collectives inside, where it is a fusion."""
        opcode = instruction.opcode
        if "is_host_transfer" in instruction.attributes:
            self._between_slices(instruction, times, op, schedule)
        elif opcode.endswith("-done"):
            schedule.wait(instruction.operands[0])
        elif opcode.endswith("-update"):
            schedule.arrival[instruction.name] = schedule.arrival.get(instruction.operands[0], schedule.now)
        elif is_collective(instruction) or opcode in ASYNC_CALLS:
            self._collective(computation, instruction, times, op, schedule)
        elif opcode in COPIES:
            schedule.start(instruction.name, instruction.arrays[0].bytes / self.hardware.generation.hbm_bandwidth, HBM)
        else:
            for transfer, inside in fused.items():
                # one that began in an enclosing computation only takes a step here
                if inside.first and transfer not in self.flying:
                    form = "sync" if inside.last else "async"
                    self._start(transfer, inside.holder, inside.instruction, form, times, op, schedule)
                    self.flying.add(transfer)
            schedule.now += self._work(computation, instruction, times, op)
            for transfer, inside in fused.items():
                if inside.last and transfer in schedule.arrival:
                    schedule.wait(transfer)
                    self.flying.discard(transfer)

    def _loop(
        self, computation: Computation, loop: Instruction, parameters: Sequence[Known], times: int, op: str
    ) -> float:
        trips, inside = self.module.trip_count(computation, loop, parameters)
        if trips is None:
            self.timing.not_understood["loop of unknown length, counted once"] += 1
            trips = 1
        body = self.module.computations[loop.attributes["body"].removeprefix("%")]
        return trips * self.play(body, inside, times * trips, op) if trips else 0.0

    def _call(
        self, computation: Computation, call: Instruction, parameters: Sequence[Known], times: int, op: str
    ) -> float:
        bodies = [self.module.computations[name] for name in call.called]
        if call.opcode == "call":
            values = [self.module.value(computation, name, parameters) for name in call.operands]
            return sum(self.play(body, values, times, op) for body in bodies)
        self.timing.not_understood["conditional: every branch counted, the longest timed"] += 1
        return max((self.play(body, [], times, op) for body in bodies), default=0.0)

    def _collective(
        self, computation: Computation, instruction: Instruction, times: int, op: str, schedule: _Schedule
    ) -> None:
        """Start a collective, and wait for it unless it is asynchronous."""
        holder, inner = computation, instruction
        if instruction.opcode in ASYNC_CALLS:
            wrapped = self._wrapped(instruction)
            if wrapped is None:
                return
            holder, inner = wrapped
        is_async = instruction.opcode.endswith("-start")
        in_window = "windowed_dot_general" in computation.name
        form = "windowed" if in_window else "async" if is_async else "sync"
        self._start(instruction.name, holder, inner, form, times, op, schedule)
        if not is_async:
            schedule.wait(instruction.name)

    def _between_slices(self, instruction: Instruction, times: int, op: str, schedule: _Schedule) -> None:
        """A collective across slices: the compiler hands its part on the network to the host, as a send and a recv."""
        if instruction.opcode == "recv":
            transfer = self.network.between_slices(instruction, op)
            self.timing.uses.append(Use(transfer, "async", times))
            schedule.start(instruction.name, transfer.seconds, transfer.links)
        elif instruction.opcode == "recv-done":
            schedule.wait(instruction.operands[0])

    def _wrapped(self, instruction: Instruction) -> tuple[Computation, Instruction] | None:
        """The collective that an asynchronous call runs, with its computation; None for other work, left out."""
        for name in instruction.called:
            inner = self.module.computations[name]
            for candidate in inner.instructions.values():
                if is_collective(candidate):
                    return inner, candidate
        self.timing.not_understood["asynchronous call without a collective"] += 1
        return None

    def _start(
        self,
        name: str,
        holder: Computation,
        instruction: Instruction,
        form: str,
        times: int,
        op: str,
        schedule: _Schedule,
    ) -> None:
        """Note a collective, and start it under `name`."""
        transfer = self.network.transfer(holder, instruction, op)
        if transfer is None:
            groups = instruction.attributes.get("replica_groups", "")
            self.timing.not_understood[f"{base_opcode(instruction)} with replica_groups {groups[:60]}"] += 1
            return
        self.timing.uses.append(Use(transfer, form, times))
        schedule.start(name, transfer.seconds, transfer.links)

    def _fused_transfers(self, computation: Computation) -> dict[str, dict[str, _Fused]]:
        """Fusions with collectives inside: name -> transfer -> collective.

        One that hides in a chain of fusions stands in each of them.
        """
        found: dict[str, list[tuple[str, Computation, Instruction]]] = defaultdict(list)
        for fusion in computation.instructions.values():
            for name in fusion.called if fusion.opcode == "fusion" else ():
                holder = self.module.computations[name]
                for inner in holder.instructions.values():
                    if base_opcode(inner) in KINDS and not inner.opcode.endswith("-done"):
                        found[inner.transfer].append((fusion.name, holder, inner))
        result: dict[str, dict[str, _Fused]] = defaultdict(dict)
        for transfer, places in found.items():
            for name, holder, inner in places:
                result[name][transfer] = _Fused(name == places[0][0], name == places[-1][0], holder, inner)
        return result

    def _work(self, computation: Computation, instruction: Instruction, times: int, op: str) -> float:
        """Seconds of the core for one execution of an instruction that is no collective."""
        generation = self.hardware.generation
        cycles = instruction.cycles
        seconds = 0.0
        if cycles is not None:
            seconds = cycles / generation.clock
        elif instruction.opcode == "custom-call" and (flops := self._kernel_flops(computation, instruction)):
            seconds = flops / generation.flops
            self.timing.kernel_seconds += seconds * times
        elif not self._is_free(computation, instruction):
            seconds = 2 * sum(array.bytes for array in instruction.arrays) / generation.hbm_bandwidth
            what = instruction.attributes.get("custom_call_target", "").strip('"')
            self.timing.not_understood[f"{instruction.opcode} {what}".strip() + NO_CYCLES] += 1
        self.timing.compute_seconds += seconds * times
        if seconds:
            self.timing.op_seconds[short_op(op)] = self.timing.op_seconds.get(short_op(op), 0.0) + seconds * times
        return seconds

    def _is_free(self, computation: Computation, instruction: Instruction) -> bool:
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done", "-update")):
            return True
        if any(map(is_collective, self.module.inside(instruction))):  # the fusion that begins or ends a collective
            return True
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        if instruction.opcode == "dynamic-update-slice":  # in place: only the update is written
            arrays = computation.instructions[instruction.operands[1]].arrays
        else:
            arrays = instruction.arrays
        return target in FREE_TARGETS or all(array.bytes < SMALL_BYTES for array in arrays)

    def _kernel_flops(self, computation: Computation, instruction: Instruction) -> float:
        """FLOPs of a kernel: of splash attention the blocks that its mask leaves; 0 for a kernel that is not known."""
        operands = [a for name in instruction.operands for a in computation.instructions[name].arrays]
        matrices = [array.dims for array in operands if array.dtype in FLOATS and len(array.dims) >= 2]
        part = next((part for part in KERNEL_PRODUCTS if f"splash_mha_{part}" in instruction.name), None)
        if part is not None:
            # q[..., heads, position, head_size] comes first, then k of the same rank with its own heads and positions
            q, k = [dims for dims in matrices if len(dims) >= 3][:2]
            return 2 * KERNEL_PRODUCTS[part] * math.prod(q) * k[-2] * self.causal
        if instruction.name.startswith("ragged-dot-") and len(matrices) >= 2:
            # [m, k] x [experts, k, n] -> [m, n] and its transposes: a row meets one expert; m k, k n, m n are the sizes
            sizes = [math.prod(dims[-2:]) for dims in (*matrices[-2:], instruction.arrays[0].dims)]
            return 2 * math.sqrt(math.prod(sizes))
        return 0.0
