"""Data classes of a compiled (scheduled) HLO module: array shapes, instructions, computations.

Opcodes and attributes are kept as text, so an unknown opcode is no error; code that has to understand it reports that
it does not.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8, "f8e4m3": 8, "f8e8m0fnu": 8,
}  # fmt: skip
"""Element type -> bits per element."""
SAME_VALUE = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier")
"""Opcodes whose result has the value of their first operand."""
HBM_SPACE, HOST_SPACE = 0, 5
"""Numbers of HBM and of host memory among the memory spaces of HLO."""


class HloError(ValueError):
    """The text is not HLO in the form that this reader supports."""


@dataclass(frozen=True)
class ArrayShape:
    """Element type and dimensions of one array, and the memory that holds it."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    """Memory space in the compiler's numbering; 0 is HBM, 5 host memory."""

    @property
    def bytes(self) -> int:
        """Bytes of the array, padding excluded.

        Raises:
            HloError: the element type is unknown.
        """
        if self.dtype not in BITS:
            raise HloError(f"unknown element type {self.dtype!r}")
        return math.prod(self.dims) * BITS[self.dtype] // 8

    @property
    def in_hbm(self) -> bool:
        """Whether the array is in HBM, rather than in a core's memory."""
        return self.space == HBM_SPACE

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return self.space == HOST_SPACE

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[ArrayShape, ...]
    """Leaves of the result's shape: one array, or the arrays of a tuple, nested tuples flattened."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation; for constants and parameters, the text in parentheses."""
    attributes: Mapping[str, str]

    @property
    def op_name(self) -> str:
        """Operation of the traced program from which the instruction comes; empty if the compiler gives none."""
        _, key, rest = self.attributes.get("metadata", "").partition('op_name="')
        return rest.partition('"')[0] if key else ""

    @property
    def custom_call_target(self) -> str:
        """Name of the function that a custom call runs; empty for other instructions."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of the instruction's duration in cycles; None if it gives none."""
        text = self.attributes.get("backend_config", "")
        if "estimated_cycles" not in text or not text.startswith("{"):
            return None
        config = json.loads(text)
        estimate = config.get("window_config", {}).get("estimated_cycles", config.get("estimated_cycles"))
        return int(estimate) if estimate is not None else None

    @property
    def collective_id(self) -> str:
        """Identifier shared by all instructions of one collective, which may be split over several fusions.

        All collectives of a shard_map share a channel; a chain of fusions has an additional number of its own.
        """
        chain = self.attributes.get("frontend_attributes", "").partition('chain_id="')[2].partition('"')[0]
        return f"{self.attributes.get('channel_id', self.name)} {chain}"

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs, except reducers, which run once per element."""
        keys = ["calls", "body", "branch_computations", "true_computation", "false_computation", "called_computations"]
        if self.opcode in ("call", "call-start", "async-start"):
            keys.append("to_apply")
        return tuple(name for key in keys for name in split_names(self.attributes.get(key, "")))


@dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order, the last of which is not necessarily the root."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction


@dataclass(frozen=True)
class Module:
    """A compiled program for one device."""

    computations: Mapping[str, Computation]
    entry: Computation

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Instruction name -> instruction, over all computations."""
        return {i.name: i for c in self.computations.values() for i in c.instructions.values()}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Return the instructions of all computations that `instruction` runs, at any depth."""
        for name in instruction.called:
            for inner in self.computations[name].instructions.values():
                yield inner
                yield from self.inside(inner)


def split_names(text: str) -> list[str]:
    """Return the names in `{%a, %b}` or `%a`, without the percent signs.

    >>> split_names("%fusion.1, %copy.2")
    ['fusion.1', 'copy.2']
    """
    return [name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip()]


def split_integers(text: str) -> tuple[int, ...]:
    """Return the integers of a comma-separated list.

    >>> split_integers("0,2,1")
    (0, 2, 1)
    """
    return tuple(int(part) for part in text.split(",") if part.strip())
