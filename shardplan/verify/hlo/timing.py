"""Models the time of one step from a scheduled module: the compiler's cycles, and transfers that may overlap them.

The schedule of each computation is simulated once: an instruction takes its estimated cycles, a synchronous collective
blocks until its bytes have arrived, an asynchronous one occupies its links from its start and blocks at its done. The
time of a loop is that of its body times its trip count.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.experts.method import OVERFLOW_SCOPE
from shardplan.hardware import Slice
from shardplan.verify.hlo.collectives import CollectiveTransfer, Network, base_opcode, is_collective, short_op
from shardplan.verify.hlo.kernels import (
    ALL_WORK,
    KernelWork,
    MemoryTraffic,
    is_masked_dense,
    kernel_seconds,
    kernels,
    memory_traffic,
)
from shardplan.verify.hlo.module import Computation, HloError, Instruction, Module, split_names
from shardplan.verify.hlo.trip_counts import SymbolicValue, evaluate_integer, trip_count
from shardplan.verify.verdict import CollectiveForm, Omission, OmissionKind

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "iota", "add-dependency", "domain",
}  # fmt: skip
"""Opcodes that take no time."""
FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "MoveToDevice", "MoveToHost")
"""Targets of custom calls that take no time."""
SMALL_BYTES = 2**20
"""Bytes below which a move is neglected, because it takes a microsecond."""
COPIES = ("copy-start", "slice-start")
"""Opcodes that start a copy between HBM and the core's memory, which overlaps with computation."""
HBM = frozenset({"hbm"})
"""Name of the link for copies between HBM and the core's memory."""
TO_HOST, FROM_HOST = frozenset({"to host"}), frozenset({"from host"})
"""The links of copies between device and host, one for each direction."""
ASYNC_CALLS = ("async-start", "call-start")
"""Opcodes that start a computation beside the core, including collectives and work on the sparse cores.

A call to a sparse core may start without operands, before they are computed; an update hands them over later."""
MAX_GROUPS_TEXT = 60
"""Maximum characters of replica groups that a report shows."""


@dataclass(frozen=True)
class CollectiveUse:
    """A collective of a compiled module, and how often a step executes it."""

    transfer: CollectiveTransfer
    form: CollectiveForm
    count: int


@dataclass
class Timing:
    """The modelled time of one step, by part."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    """Seconds that the core computes; in the remaining `seconds` it waits for transfers."""
    kernel_seconds: float = 0.0
    """Part of `compute_seconds` that is modelled from FLOPs and HBM because the compiler gives no cycles."""
    masked_dense_seconds: float = 0.0
    """Part of `compute_seconds` for grouped matmuls that the compiler computes as dense ones over all groups."""
    uses: list[CollectiveUse] = field(default_factory=list)
    op_seconds: dict[str, float] = field(default_factory=dict)
    """Operation of the traced program -> compute seconds."""
    not_understood: Counter[Omission] = field(default_factory=Counter)
    """Omission -> number of its occurrences in the module."""


def model_step(module: Module, network: Network, hardware: Slice, work: KernelWork = ALL_WORK) -> Timing:
    """Simulate the schedule of `module`.

    >>> from shardplan.hardware import parse_slice
    >>> from shardplan.verify.hlo.parser import parse
    >>> module = parse('''ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %p = f32[8] parameter(0)
    ...   ROOT %sum = f32[8] add(%p, %p), backend_config={"estimated_cycles":"1500"}
    ... }''')
    >>> v5e = parse_slice("v5e-1")  # at 1.5 GHz
    >>> model_step(module, Network({"data": 1}, v5e, [0]), v5e).seconds
    1e-06

    Args:
        work: the work of kernels, which the module does not contain.

    Raises:
        HloError: the module has a structure that this reader does not know.
    """
    simulator = _Simulator(module, network, hardware, work)
    try:
        simulator.timing.seconds = simulator.simulate(module.entry, [], 1, "")
    except (KeyError, IndexError, ValueError) as error:
        raise HloError(f"not a module as this reader knows it: {error!r}") from error
    return simulator.timing


class _Clock:
    """A simulated clock of one execution: the core's time, and the completion times of overlapped transfers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free_at: defaultdict[str, float] = defaultdict(float)
        """Link -> the time at which it is free."""
        self.arrival: dict[str, float] = {}
        """Name of an instruction, or identifier of a collective in fusions -> the time at which it is complete."""

    def start(self, name: str, seconds: float, links: Iterable[str]) -> None:
        """Start a transfer beside the core, as soon as all its links are free."""
        begin = max([self.now, *(self.free_at[link] for link in links)])
        self.arrival[name] = begin + seconds
        self.free_at.update(dict.fromkeys(links, begin + seconds))

    def wait(self, name: str) -> None:
        """Make the core wait for the transfer that was started under `name`, if there is one."""
        self.now = max(self.now, self.arrival.get(name, self.now))


@dataclass(frozen=True)
class _FusedCollective:
    """A collective inside of a fusion; several fusions of a chain may contain the same collective."""

    is_first: bool
    """Whether the fusion is the first one in the computation that contains the collective."""
    is_last: bool
    computation: Computation
    instruction: Instruction


@dataclass(frozen=True)
class _Scope:
    """One simulated execution of a computation: its parameters' values, how often a step executes it, and its clock."""

    computation: Computation
    parameters: Sequence[SymbolicValue]
    count: int
    clock: _Clock


class _Simulator:
    def __init__(self, module: Module, network: Network, hardware: Slice, work: KernelWork) -> None:
        self.module, self.network, self.hardware, self.work = module, network, hardware, work
        self.timing = Timing()
        self.in_flight: set[str] = set()
        """Identifiers of collectives in fusions that have started and not ended."""

    def simulate(
        self, computation: Computation, parameters: Sequence[SymbolicValue], count: int, context: str
    ) -> float:
        """Return the seconds of one execution of `computation`, which a step executes `count` times.

        Args:
            context: the operation of the traced program for instructions that name none.
        """
        scope = _Scope(computation, parameters, count, _Clock())
        fused = self._fused_collectives(computation)
        for instruction in computation.instructions.values():
            op = instruction.op_name or context
            try:
                if instruction.opcode == "while":
                    scope.clock.now += self._loop_seconds(instruction, op, scope)
                elif instruction.opcode in ("call", "conditional"):
                    scope.clock.now += self._call_seconds(instruction, op, scope)
                else:
                    self._execute(instruction, op, scope, fused.get(instruction.name, {}))
            except HloError as error:
                self._omit(OmissionKind.INSTRUCTION, instruction.opcode, str(error))
        return scope.clock.now

    def _execute(self, instruction: Instruction, op: str, scope: _Scope, fused: Mapping[str, _FusedCollective]) -> None:
        """Execute an instruction without control flow; `fused` maps identifiers to the collectives fused into it."""
        opcode, clock = instruction.opcode, scope.clock
        if "is_host_transfer" in instruction.attributes:
            self._transfer_between_slices(instruction, op, scope)
        elif opcode.endswith("-done"):
            clock.wait(instruction.operands[0])
        elif opcode.endswith("-update"):
            self._continue(instruction, op, scope)
        elif opcode in ASYNC_CALLS and not instruction.operands:
            pass  # it waits for its operands, with which an update begins the transfer
        elif is_collective(instruction) or opcode in ASYNC_CALLS:
            self._execute_collective(instruction, op, scope)
        elif opcode.endswith("-start") and any(array.on_host for array in instruction.arrays):
            self._copy_to_or_from_host(instruction, clock)
        elif opcode in COPIES:
            copied = min(
                array.bytes for array in instruction.arrays[:2]
            )  # of a slice, one is all that it is taken from
            clock.start(instruction.name, copied / self.hardware.generation.hbm_bandwidth, HBM)
        else:
            for identifier, inside in fused.items():
                # a collective that was started in an enclosing computation only advances here
                if inside.is_first and identifier not in self.in_flight:
                    form = CollectiveForm.SYNC if inside.is_last else CollectiveForm.ASYNC
                    self._start(identifier, inside.computation, inside.instruction, form, op, scope)
                    self.in_flight.add(identifier)
            clock.now += self._compute(instruction, op, scope)
            for identifier, inside in fused.items():
                if inside.is_last and identifier in clock.arrival:
                    clock.wait(identifier)
                    self.in_flight.discard(identifier)

    def _loop_seconds(self, loop: Instruction, op: str, scope: _Scope) -> float:
        """Return the seconds of a loop; an unknown number of iterations counts as one.

        The loop over rows that overflow the buffers of experts counts as never run, because all experts are assumed to
        get equally many rows.
        """
        if OVERFLOW_SCOPE in loop.op_name:
            return 0.0
        trips, inside = trip_count(self.module, scope.computation, loop, scope.parameters)
        if trips is None:
            self._omit(OmissionKind.TRIP_COUNT)
            trips = 1
        [name] = split_names(loop.attributes["body"])
        body = self.module.computations[name]
        return trips * self.simulate(body, inside, scope.count * trips, op) if trips else 0.0

    def _call_seconds(self, call: Instruction, op: str, scope: _Scope) -> float:
        """Return the seconds of a call, or of the longest branch of a conditional."""
        bodies = [self.module.computations[name] for name in call.called]
        if call.opcode == "call":
            values = [
                evaluate_integer(self.module, scope.computation, name, scope.parameters) for name in call.operands
            ]
            return sum(self.simulate(body, values, scope.count, op) for body in bodies)
        self._omit(OmissionKind.CONDITIONAL)
        return max((self.simulate(body, [], scope.count, op) for body in bodies), default=0.0)

    def _execute_collective(self, instruction: Instruction, op: str, scope: _Scope) -> None:
        """Start a collective, and wait for it unless it is asynchronous."""
        computation, inner = scope.computation, instruction
        if instruction.opcode in ASYNC_CALLS:
            called = self._called_collective(instruction)
            if called is None:
                self._omit(OmissionKind.ASYNC_CALL)
                return
            computation, inner = called
        is_async = instruction.opcode.endswith("-start")
        if "windowed_dot_general" in scope.computation.name:
            form = CollectiveForm.WINDOWED
        else:
            form = CollectiveForm.ASYNC if is_async else CollectiveForm.SYNC
        self._start(instruction.name, computation, inner, form, op, scope)
        if not is_async:
            scope.clock.wait(instruction.name)

    def _continue(self, update: Instruction, op: str, scope: _Scope) -> None:
        """Execute an update: a transfer continues, or starts now if it waited for its operands."""
        previous, clock = scope.computation.instructions[update.operands[0]], scope.clock
        if previous.opcode in ASYNC_CALLS and not previous.operands:
            self._execute_collective(previous, previous.op_name or op, scope)
        clock.arrival[update.name] = clock.arrival.get(previous.name, clock.now)

    def _transfer_between_slices(self, instruction: Instruction, op: str, scope: _Scope) -> None:
        """Execute the network part of a collective across slices: a send to the host, and a recv from it."""
        if instruction.opcode == "recv":
            transfer = self.network.transfer_between_slices(instruction, op)
            self.timing.uses.append(CollectiveUse(transfer, CollectiveForm.ASYNC, scope.count))
            scope.clock.start(instruction.name, transfer.seconds, transfer.links)
        elif instruction.opcode == "recv-done":
            scope.clock.wait(instruction.operands[0])

    def _copy_to_or_from_host(self, instruction: Instruction, clock: _Clock) -> None:
        """Start a copy of an array, or of a slice of an array, between device and host memory."""
        arrays = instruction.arrays  # of a copy the result is the first one; of a slice the last before a context
        result = arrays[0] if instruction.opcode == "copy-start" else arrays[-2]
        copied = max(array.bytes for array in arrays if not array.on_host)
        link = TO_HOST if result.on_host else FROM_HOST
        clock.start(instruction.name, copied / self.hardware.generation.host_bandwidth, link)

    def _called_collective(self, call: Instruction) -> tuple[Computation, Instruction] | None:
        """Return the collective that an asynchronous call runs, with its computation; None for other calls."""
        for name in call.called:
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                if is_collective(instruction):
                    return computation, instruction
        return None

    def _start(
        self,
        name: str,
        computation: Computation,
        instruction: Instruction,
        form: CollectiveForm,
        op: str,
        scope: _Scope,
    ) -> None:
        """Record a collective, which is `instruction` of `computation`, and start it under `name`."""
        transfer = self.network.transfer(computation, instruction, op)
        if transfer is None:
            groups = instruction.attributes.get("replica_groups", "")[:MAX_GROUPS_TEXT]
            self._omit(OmissionKind.REPLICA_GROUPS, base_opcode(instruction), groups)
            return
        self.timing.uses.append(CollectiveUse(transfer, form, scope.count))
        scope.clock.start(name, transfer.seconds, transfer.links)

    def _fused_collectives(self, computation: Computation) -> dict[str, dict[str, _FusedCollective]]:
        """Return name of a fusion -> `Instruction.collective_id` -> the collective inside of the fusion.

        A collective that overlaps a chain of fusions is an instruction of each of them: it starts before the first and
        is waited for after the last.
        """
        fusions: dict[str, list[tuple[str, Computation, Instruction]]] = defaultdict(list)
        for fusion in computation.instructions.values():
            for called in fusion.called if fusion.opcode == "fusion" else ():
                inner = self.module.computations[called]
                for instruction in inner.instructions.values():
                    if is_collective(instruction) and not instruction.opcode.endswith("-done"):
                        fusions[instruction.collective_id].append((fusion.name, inner, instruction))
        result: dict[str, dict[str, _FusedCollective]] = defaultdict(dict)
        for identifier, uses in fusions.items():
            first, last = uses[0][0], uses[-1][0]
            for name, inner, instruction in uses:
                result[name][identifier] = _FusedCollective(name == first, name == last, inner, instruction)
        return result

    def _compute(self, instruction: Instruction, op: str, scope: _Scope) -> float:
        """Return the compute seconds of one execution of an instruction that is not a collective."""
        generation = self.hardware.generation
        calls = kernels(self.module, scope.computation, instruction)
        seconds = sum(kernel_seconds(call, computation, generation, self.work) for computation, call in calls)
        self.timing.kernel_seconds += seconds * scope.count
        if instruction.cycles is not None:
            seconds += instruction.cycles / generation.clock
        elif not seconds:
            traffic = memory_traffic(self.module, scope.computation, instruction)
            if not self._is_free(instruction, traffic):
                seconds = traffic.bytes / generation.hbm_bandwidth
                self._omit(traffic.assumption, traffic.subject)
        if seconds and is_masked_dense(self.module, scope.computation, instruction):
            self.timing.masked_dense_seconds += seconds * scope.count
        self.timing.compute_seconds += seconds * scope.count
        if seconds:
            op = short_op(op)
            self.timing.op_seconds[op] = self.timing.op_seconds.get(op, 0.0) + seconds * scope.count
        return seconds

    def _is_free(self, instruction: Instruction, traffic: MemoryTraffic) -> bool:
        """Return whether an instruction takes no time on the core: bookkeeping, part of a transfer, or small."""
        if instruction.opcode in FREE or instruction.opcode.endswith(("-start", "-done", "-update")):
            return True
        if any(map(is_collective, self.module.inside(instruction))):  # the fusion that starts or ends a collective
            return True
        return instruction.custom_call_target in FREE_TARGETS or all(a.bytes < SMALL_BYTES for a in traffic.arrays)

    def _omit(self, kind: OmissionKind, subject: str = "", detail: str = "") -> None:
        self.timing.not_understood[Omission(kind, subject, detail)] += 1
