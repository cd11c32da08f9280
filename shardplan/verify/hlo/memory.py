"""Which arrays fill the memory of a compiled program: the compiler's own live ranges, with names and operations."""

from shardplan.verify.hlo.collectives import short_op
from shardplan.verify.hlo.module import Array, Instruction, Module
from shardplan.verify.verdict import Buffer

LARGEST = 12
"""Buffers that are reported."""
HBM = 0


def live_at_peak(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, index in the tuple, and bytes of every value alive at the peak, from the text of the compiler's report.

    The report has a section `Live ranges at T (peak):` with lines `name{1}: 123 bytes (cumulative: 456 bytes)`.
    """
    _, found, rest = text.partition("(peak):\n")
    values = []
    for line in rest.splitlines() if found else []:
        place, separator, size = line.strip().partition("}: ")
        if not separator or not size.split(" ")[0].isdigit():
            break
        name, _, index = place.partition("{")
        values.append((name, tuple(int(i) for i in index.split(",") if i), int(size.split(" ")[0])))
    return values


def hbm_buffers(module: Module, live_ranges: str) -> list[Buffer]:
    """All values in HBM at the peak, the largest first."""
    buffers = []
    for name, index, size in live_at_peak(live_ranges):
        instruction = module.instructions.get(name)
        if instruction is None:
            buffers.append(Buffer(size, "?", name))
            continue
        array = _array(instruction, index)
        if array is None or array.space == HBM:
            buffers.append(Buffer(size, str(array or "tuple"), _maker(instruction)))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)


def hbm_bytes(usage: str) -> int:
    """Bytes of HBM that the program needs, layouts and gaps included, from the text of the compiler's usage report.

    The report has a section for every memory: `Memory Space: default (color=0)`, then `Total bytes: 123 (...)`.
    """
    _, _, rest = usage.partition("(color=0)\nTotal bytes: ")
    return int(rest.partition(" ")[0] or 0)


def _array(instruction: Instruction, index: tuple[int, ...]) -> Array | None:
    if len(instruction.arrays) == 1:
        return instruction.arrays[0]
    # a nested tuple would need its shape; the compiler's programs have flat ones
    return instruction.arrays[index[0]] if len(index) == 1 and index[0] < len(instruction.arrays) else None


def _maker(instruction: Instruction) -> str:
    if instruction.opcode == "parameter" and instruction.op_name:
        return instruction.op_name.removesuffix("[0]")  # the array in a NamedArray
    return short_op(instruction.op_name) or instruction.name
