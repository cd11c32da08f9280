"""Reads the text of a compiled (scheduled) HLO module: computations, instructions, shapes, constants, trip counts.

The grammar is small: a computation is a header, a line per instruction, and a brace; an instruction is
`%name = SHAPE opcode(OPERANDS), key=value, ...`. Lines are cut at commas outside of brackets and quotes. Opcodes and
attributes are kept as text, so an unknown one is no error; whoever needs to understand it says that it does not.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16,
    "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2fnuz": 8, "f8e4m3": 8, "f8e8m0fnu": 8,
}  # fmt: skip
"""Bits per element of a type."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|->|[()\[\]{},]')
"""What structures a line: quoted text and comments as wholes, brackets, commas."""
_SPACE = re.compile(r"S\((\d+)\)")
_STRUCTURE = ("parameter", "tuple", "get-tuple-element")
SAME_VALUE = ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "opt-barrier")


class HloError(ValueError):
    """The text is not HLO as this module knows it."""


@dataclass(frozen=True)
class Array:
    """Shape of one array: a dtype, dimensions, and the memory it is in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    """Memory space; 0 is HBM."""

    @property
    def bytes(self) -> int:
        """Size without the padding of its layout."""
        if self.dtype not in BITS:
            raise HloError(f"unknown element type {self.dtype!r}")
        return math.prod(self.dims) * BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Leaves of the result's shape: one array, or those of a tuple, nested tuples flattened."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation; for constants and parameters the text in parentheses."""
    attributes: Mapping[str, str]

    @property
    def op_name(self) -> str:
        """The operation of the traced program that it comes from; empty where the compiler does not say."""
        _, found, rest = self.attributes.get("metadata", "").partition('op_name="')
        return rest.partition('"')[0] if found else ""

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of its duration; None where there is none."""
        text = self.attributes.get("backend_config", "")
        if "estimated_cycles" not in text or not text.startswith("{"):
            return None
        config = json.loads(text)
        estimate = config.get("window_config", {}).get("estimated_cycles", config.get("estimated_cycles"))
        return int(estimate) if estimate is not None else None

    @property
    def transfer(self) -> str:
        """Of a collective: what the instructions have in common that are pieces of it, in a chain of fusions.

        Those that a shard_map asks for all have one channel; a chain of fusions has a number besides.
        """
        chain = self.attributes.get("frontend_attributes", "").partition('chain_id="')[2].partition('"')[0]
        return f"{self.attributes.get('channel_id', self.name)} {chain}"

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs as a part of itself; reducers, which run per element, are left out."""
        keys = ["calls", "body", "branch_computations", "true_computation", "false_computation", "called_computations"]
        if self.opcode in ("call", "call-start", "async-start"):
            keys.append("to_apply")
        return tuple(name for key in keys for name in _names(self.attributes.get(key, "")))


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled; the last is not necessarily the root."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction


@dataclass(frozen=True)
class Value:
    """What is known of an integer: `offset`, plus the loop variable in `slot` where that is not None."""

    slot: int | None
    offset: int


Known = Value | None | list["Known"]
"""A value, an unknown one, or the elements of a tuple."""


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
        """The instructions that `instruction` runs as a part of itself, at any depth."""
        for name in instruction.called:
            for inner in self.computations[name].instructions.values():
                yield inner
                yield from self.inside(inner)

    def value(self, computation: Computation, name: str, parameters: Sequence[Known]) -> Known:
        """What can be known of instruction `name` when the parameters of its computation are `parameters`."""
        instruction = computation.instructions.get(name)
        if instruction is None:
            return None

        def operand(i: int) -> Known:
            return self.value(computation, instruction.operands[i], parameters)

        opcode = instruction.opcode
        if opcode not in _STRUCTURE and any(array.dims for array in instruction.arrays):
            return None  # an array: nothing that counts
        if opcode == "constant":
            text = instruction.operands[0]
            return Value(None, int(text)) if text.lstrip("-").isdigit() else None
        if opcode == "parameter":
            number = int(instruction.operands[0])
            return parameters[number] if number < len(parameters) else None
        if opcode == "tuple":
            return [operand(i) for i in range(len(instruction.operands))]
        if opcode == "get-tuple-element":
            elements, index = operand(0), int(instruction.attributes["index"])
            return elements[index] if isinstance(elements, list) and index < len(elements) else None
        if opcode in SAME_VALUE:
            return operand(0)
        if opcode in ("add", "subtract", "multiply"):
            return _arithmetic(opcode, operand(0), operand(1))
        if opcode in ("fusion", "call") and instruction.called:
            inner = self.computations[instruction.called[0]]
            return self.value(inner, inner.root.name, [operand(i) for i in range(len(instruction.operands))])
        return None

    def trip_count(
        self, computation: Computation, loop: Instruction, parameters: Sequence[Known]
    ) -> tuple[int | None, list[Known]]:
        """How often `loop` (a `while` in `computation`) runs, and what is known of its body's parameters.

        The loop variable starts at a constant, the body adds a constant, and the condition compares it with a constant;
        any of them may come from outside through the loop's tuple. Where it is otherwise the count is None.
        """
        start = self.value(computation, loop.operands[0], parameters)
        if not isinstance(start, list):
            return None, []
        body = self.computations[_names(loop.attributes["body"])[0]]
        condition = self.computations[_names(loop.attributes["condition"])[0]]
        slots: list[Known] = [Value(slot, 0) for slot in range(len(start))]
        after = self.value(body, body.root.name, [slots])
        if not isinstance(after, list):
            return None, []
        # what the body hands on as it got it is what it was at the start; all else stays symbolic
        constant = [new == slot for new, slot in zip(after, slots, strict=True)]
        inside = [first if same else None for first, same in zip(start, constant, strict=True)]
        symbolic = [
            first if same and first is not None else slot
            for first, same, slot in zip(start, constant, slots, strict=True)
        ]
        steps = self.value(body, body.root.name, [symbolic])
        compared = self._comparison(condition, condition.root, [symbolic])
        if compared is None or not isinstance(steps, list):
            return None, [inside]
        return _trips(*compared, start, steps), [inside]

    def _comparison(
        self, computation: Computation, root: Instruction, parameters: Sequence[Known]
    ) -> tuple[Value, int, str] | None:
        """Loop variable, limit and direction of the comparison that `root` is, directly or in a fusion."""
        operands = [self.value(computation, name, parameters) for name in root.operands]
        if root.opcode == "fusion":
            inner = self.computations[root.called[0]]
            return self._comparison(inner, inner.root, operands)
        if root.opcode in SAME_VALUE:
            return self._comparison(computation, computation.instructions[root.operands[0]], parameters)
        if root.opcode != "compare":
            return None
        left, right = operands
        if not isinstance(left, Value) or not isinstance(right, Value) or (left.slot is None) == (right.slot is None):
            return None
        direction = root.attributes["direction"]
        if left.slot is not None:
            return left, right.offset, direction
        return right, left.offset, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)


def parse(text: str) -> Module:
    """The module that `text` describes.

    Raises:
        HloError: there is no entry computation, or a line inside of a computation is not an instruction.
    """
    computations: dict[str, Computation] = {}
    entry = None
    for header, body in _bodies(text):
        name = header.removeprefix("ENTRY ").partition(" ")[0].removeprefix("%")
        try:
            parsed = [_instruction(line.removeprefix("ROOT ")) for line in body]
        except (ValueError, KeyError) as error:
            raise HloError(f"computation {name}: {error}") from error
        root = [instruction for instruction, line in zip(parsed, body, strict=True) if line.startswith("ROOT ")]
        if len(root) != 1:
            raise HloError(f"computation {name} has {len(root)} roots")
        computations[name] = Computation(name, {instruction.name: instruction for instruction in parsed}, root[0])
        if header.startswith("ENTRY "):
            entry = computations[name]
    if entry is None:
        raise HloError("no entry computation")
    return Module(computations, entry)


def _bodies(text: str) -> Iterator[tuple[str, list[str]]]:
    """Header and instructions of every computation."""
    header, body = None, list[str]()
    for line in text.splitlines():
        if header is None:
            if line.endswith("{") and "->" in line and not line.startswith("HloModule"):
                header, body = line, []
        elif line == "}" or line.startswith("}, "):
            yield header, body
            header = None
        elif line.lstrip().startswith(("%", "ROOT ")) or not body:
            body.append(line.strip())
        else:
            body[-1] += line  # quoted text may hold line ends


def replica_groups(text: str, devices: int) -> list[tuple[int, ...]] | None:
    """Groups of partition numbers: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`.

    No groups at all stand for one group of all `devices`; None where the notation is not understood.
    """
    text = text.strip()
    if text in ("", "{}"):
        return [tuple(range(devices))]
    if text.startswith("{"):
        return [_numbers(group) for group in text.strip("{}").split("},{")]
    if "<=" in text:
        shape, _, source = text.partition("<=")
        dims, _, order = source.partition("T")
        values = _transposed(_numbers(dims.strip("[]")), _numbers(order.strip("()")))
        return _rows(values, _numbers(shape.strip("[]"))[-1])
    if text.startswith("mesh["):
        return _mesh_groups(text)
    return None


def source_target_pairs(text: str) -> list[tuple[int, int]]:
    """`{{0,1},{1,0}}`: (source, target) partition numbers."""
    return [(pair[0], pair[1]) for pair in map(_numbers, text.strip("{}").split("},{"))]


def _mesh_groups(text: str) -> list[tuple[int, ...]] | None:
    """Groups of `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`; without `device_ids` devices are in order."""
    declared, _, rest = text.removeprefix("mesh[").partition("]")
    ids, brace, used = rest.rpartition("{")
    sizes = {}
    for item in declared.split(","):
        name, _, size = item.strip().partition("=")
        if not size.isdigit():
            return None
        sizes[name] = int(size)
    chosen = _names(used.strip().removesuffix("}"))
    if not brace or not set(chosen) <= set(sizes):
        return None  # parts of axes
    devices = list(range(math.prod(sizes.values())))
    ids = ids.strip().removeprefix(",").strip()
    if ids:
        tile, _, order = ids.removeprefix("device_ids=(").removesuffix(")").partition("T")
        devices = _transposed(_numbers(tile.strip("[]")), _numbers(order.strip("()")))
    names = list(sizes)
    dims = [*(i for i, name in enumerate(names) if name not in chosen), *(names.index(name) for name in chosen)]
    places = _transposed(tuple(sizes.values()), tuple(dims))
    return _rows([devices[place] for place in places], math.prod(sizes[name] for name in chosen))


def _transposed(dims: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """0 ... n-1 in row-major order of `dims`, read with the dimensions in `order`."""
    values = [0]
    for dimension in order or range(len(dims)):
        stride = math.prod(dims[dimension + 1 :])
        values = [value + k * stride for value in values for k in range(dims[dimension])]
    return values


def _rows(values: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(values[i : i + size]) for i in range(0, len(values), size)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _names(text: str) -> list[str]:
    return [name.strip().removeprefix("%") for name in text.strip("{}").split(",") if name.strip()]


def _trips(variable: Value, limit: int, direction: str, start: Sequence[Known], steps: Sequence[Known]) -> int | None:
    assert variable.slot is not None
    first, after = start[variable.slot], steps[variable.slot]
    if not isinstance(first, Value) or first.slot is not None or not isinstance(after, Value):
        return None
    if after.slot != variable.slot or after.offset == 0:
        return None
    distance = limit - (first.offset + variable.offset) + {"LE": 1, "GE": -1}.get(direction, 0)
    if direction == "EQ" or (direction == "NE" and distance % after.offset):
        return None
    rising = direction in ("LT", "LE") or (direction == "NE" and distance > 0)
    if distance == 0 or (distance > 0) != rising:
        return 0
    return -(-distance // after.offset) if (after.offset > 0) == rising else None


def _arithmetic(opcode: str, left: Known, right: Known) -> Known:
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    if opcode == "add" and (left.slot is None or right.slot is None):
        return Value(left.slot if right.slot is None else right.slot, left.offset + right.offset)
    if opcode == "subtract" and right.slot is None:
        return Value(left.slot, left.offset - right.offset)
    if opcode == "multiply" and left.slot is None and right.slot is None:
        return Value(None, left.offset * right.offset)
    return None


def _instruction(line: str) -> Instruction:
    name, equals, rest = line.partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", end)
    if not equals or end <= 0 or opening < 0:
        raise HloError(f"not an instruction: {line[:120]}")
    closing = _closing(rest, opening)
    opcode, inner = rest[end:opening].strip(), rest[opening + 1 : closing]
    if opcode in ("constant", "parameter"):
        operands = [inner.strip()]
    else:
        # an operand may have its shape before its name
        operands = [part.split(" ")[-1].removeprefix("%") for part in _split(inner)]
    attributes: dict[str, str] = {}
    for part in _split(rest[closing + 1 :]):
        key, _, value = part.partition("=")
        if key == "device_ids":  # belongs to the replica groups, behind a comma of theirs
            attributes["replica_groups"] += f", {part}"
        else:
            attributes[key] = value
    return Instruction(name.removeprefix("%"), opcode, tuple(_arrays(rest[:end])), tuple(operands), attributes)


def _arrays(shape: str) -> Iterator[Array]:
    if shape.startswith("("):
        for part in _split(shape[1:-1]):
            yield from _arrays(part)
        return
    dtype, _, rest = shape.partition("[")
    dims, _, layout = rest.partition("]")
    space = _SPACE.search(layout)
    # a dimension of dynamic size is written as its bound
    yield Array(dtype, _numbers(dims.replace("<=", "")), int(space[1]) if space else 0)


def _split(text: str) -> list[str]:
    """`text` cut at the commas outside of brackets and quotes; comments and empty parts left out."""
    parts, pieces, depth, start = [], [], 0, 0
    for match in _BRACKETS.finditer(text):
        token = match[0]
        if token.startswith("/*"):
            pieces.append(text[start : match.start()])
            start = match.end()
        elif token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif token == "," and depth == 0:
            parts.append("".join([*pieces, text[start : match.start()]]).strip())
            pieces, start = [], match.end()
    parts.append("".join([*pieces, text[start:]]).strip())
    return [part for part in parts if part]


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for match in _BRACKETS.finditer(text, opening):
        if match[0] in ("(", "[", "{"):
            depth += 1
        elif match[0] in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return match.start()
    raise HloError(f"unbalanced brackets: {text[:120]}")
