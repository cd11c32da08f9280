"""Lists the arrays that fill the memory of a compiled program, from the compiler's live ranges."""

import re
from collections import Counter
from collections.abc import Iterator

from shardplan.verify.hlo.collectives import short_op
from shardplan.verify.hlo.module import BITS, HBM_SPACE, HOST_SPACE, ArrayShape, Instruction, Module, split_integers
from shardplan.verify.verdict import Buffer, LiveBytes

MAX_POINTS = 200
"""Maximum number of points at which live bytes are listed."""
_RANGE = re.compile(r"^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_SCHEDULED = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)


def parse_live_at_peak(text: str) -> list[tuple[str, tuple[int, ...], int]]:
    r"""Return name, tuple index and bytes of every value live at the peak, from the compiler's live-range report.

    The report has a section `Live ranges at T (peak):` with lines `name{1}: 123 bytes (cumulative: 456 bytes)`.

    >>> parse_live_at_peak("Live ranges at 7 (peak):\nfusion.1{}: 512 bytes (cumulative: 512 bytes)\n")
    [('fusion.1', (), 512)]
    """
    _, _, section = text.partition("(peak):\n")
    values = []
    for line in section.splitlines():
        value, separator, size = line.strip().partition("}: ")
        if not separator or not size.split(" ")[0].isdigit():
            break
        name, _, index = value.partition("{")
        values.append((name, tuple(int(i) for i in index.split(",") if i), int(size.split(" ")[0])))
    return values


def hbm_buffers(module: Module, live_ranges: str, usage: str) -> list[Buffer]:
    r"""Return all values in HBM at the peak, largest first.

    >>> from shardplan.verify.hlo.module import Computation
    >>> add = Instruction("fusion.1", "fusion", (ArrayShape("f32", (128,)),), (), {})
    >>> main = Computation("main", {"fusion.1": add}, add)
    >>> report = "Live ranges at 7 (peak):\nfusion.1{}: 512 bytes (cumulative: 512 bytes)\n"
    >>> hbm_buffers(Module({"main": main}, main), report, usage="")
    [Buffer(bytes=512, shape='f32[128]', op='fusion.1')]

    Args:
        live_ranges: the text of the compiler's live-range report, which has values of all memories, some under names
            that are not in the module.
        usage: the text of the compiler's usage report.
    """
    buffers = []
    host_sizes = _host_sizes(usage)
    for name, index, size in parse_live_at_peak(live_ranges):
        instruction = module.instructions.get(name)
        if instruction is None:
            if size not in host_sizes:
                buffers.append(Buffer(size, "?", name))
            continue
        array = _array_at(instruction, index)
        if array is None or array.in_hbm:
            buffers.append(Buffer(size, str(array or "tuple"), _origin(instruction)))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)


def live_bytes(module: Module, live_ranges: str) -> list[LiveBytes]:
    r"""Return the live HBM bytes at up to `MAX_POINTS` points of the program, the peak included.

    The report has a section of lines `7:fusion`, the schedule, and a section of lines `fusion{0}:7-9`, the live ranges.
    It does not say which results overwrite operands that are used for the last time. The function assumes that all of
    them do: in 6 programs, the largest sum was then at most 2% below the compiler's; without this assumption it was up
    to 8% above.

    >>> from shardplan.verify.hlo.module import Computation
    >>> array = ArrayShape("f32", (128,))
    >>> a, b = (Instruction(name, "fusion", (array,), (), {}) for name in ("a", "b"))
    >>> main = Computation("main", {"a": a, "b": b}, b)
    >>> report = "    0:a\n    1:b\nBufferLiveRange:\n    a{}:0-2\n    b{}:1-2\n"
    >>> live_bytes(Module({"main": main}, main), report)
    [LiveBytes(op='a', bytes=512), LiveBytes(op='b', bytes=1024)]
    """
    order, _, ranges = live_ranges.partition("BufferLiveRange:")
    scheduled = {int(at): name for at, name in _SCHEDULED.findall(order)}
    changes: Counter[int] = Counter()
    for name, index, start, end in _RANGE.findall(ranges):
        instruction = module.instructions.get(name)
        array = _array_at(instruction, tuple(map(int, filter(None, index.split(","))))) if instruction else None
        if array is not None and array.in_hbm:
            changes[int(start)] += array.bytes
            changes[int(end)] -= array.bytes
    points, total = [], 0
    for at in sorted(changes)[:-1]:  # after the last change nothing is live
        total += changes[at]
        running = module.instructions.get(scheduled.get(at, ""))
        points.append(LiveBytes(_origin(running) if running else "", total))
    return list(_thin(points))


def _thin(points: list[LiveBytes]) -> Iterator[LiveBytes]:
    """Keep at most `MAX_POINTS` points: yield the largest of every few."""
    size = -(-len(points) // MAX_POINTS) or 1
    for i in range(0, len(points), size):
        yield max(points[i : i + size], key=lambda point: point.bytes)


def hbm_bytes(usage: str) -> int:
    r"""Return the HBM bytes that the program requires, padding and gaps included, from the compiler's usage report.

    >>> hbm_bytes("Memory Space: default (color=0)\nTotal bytes: 512 (512B)\n")
    512
    """
    return _space_bytes(usage, HBM_SPACE)


def host_bytes(usage: str) -> int:
    r"""Return the host memory bytes that the program requires per device, from the compiler's usage report.

    >>> host_bytes("Memory Space: default (color=0)\nTotal bytes: 512 (512B)\n")
    0
    >>> host_bytes("Memory Space: host (color=5)\nTotal bytes: 64 (64B)\n")
    64
    """
    return _space_bytes(usage, HOST_SPACE)


def _space_bytes(usage: str, space: int) -> int:
    """Return the bytes of a memory space; 0 if the report has no section for it.

    A section has the line `Memory Space: default (color=0)`, then `Total bytes: 123 (...)`.
    """
    _, _, rest = usage.partition(f"(color={space})\nTotal bytes: ")
    return int(rest.partition(" ")[0] or 0)


def _host_sizes(usage: str) -> set[int]:
    """Return the bytes of every array in host memory, from the text of the compiler's usage report."""
    _, _, rest = usage.partition(f"(color={HOST_SPACE})\n")
    section, _, _ = rest.partition("Memory Space: ")
    return {ArrayShape(dtype, split_integers(dims)).bytes for dtype, dims in _SHAPE.findall(section) if dtype in BITS}


def _array_at(instruction: Instruction, index: tuple[int, ...]) -> ArrayShape | None:
    """Return the array at an index of an instruction's result; None if the result has no such array."""
    if len(instruction.arrays) == 1:
        return instruction.arrays[0]
    # the index of a nested tuple would need the nested shape; the compiler's programs have flat tuples
    return instruction.arrays[index[0]] if len(index) == 1 and index[0] < len(instruction.arrays) else None


def _origin(instruction: Instruction) -> str:
    """Return the path of an argument, or the operation that made the value."""
    if instruction.opcode == "parameter" and instruction.op_name:
        return instruction.op_name.removesuffix("[0]")  # the array in a NamedArray
    return short_op(instruction.op_name) or instruction.name
