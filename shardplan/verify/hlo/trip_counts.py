"""Evaluates constant integers of an HLO module, and the trip counts of its loops."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardplan.verify.hlo.module import SAME_VALUE, Computation, Instruction, Module, split_names

_STRUCTURE = ("parameter", "tuple", "get-tuple-element")


@dataclass(frozen=True)
class SymbolicInt:
    """An integer: `offset`, plus the loop variable at index `slot` of the loop's tuple unless `slot` is None."""

    slot: int | None
    offset: int


SymbolicValue = SymbolicInt | None | list["SymbolicValue"]
"""An integer, an unknown value (None), or the elements of a tuple."""


class ComparisonDirection(StrEnum):
    """The comparisons of a `compare` instruction."""

    EQ = "EQ"
    NE = "NE"
    LT = "LT"
    LE = "LE"
    GT = "GT"
    GE = "GE"


_EQ, _NE, _LT, _LE, _GT, _GE = ComparisonDirection
_MIRRORED = {_EQ: _EQ, _NE: _NE, _LT: _GT, _LE: _GE, _GT: _LT, _GE: _LE}
"""Direction -> the direction of the same comparison with its operands swapped."""


@dataclass(frozen=True)
class _LoopCondition:
    """The condition of a loop: it continues while `variable` compares to `limit` in `direction`.

    `slot` is the variable's index in the loop's tuple.
    """

    slot: int
    delta: int
    """Number that the condition adds to the loop variable before it compares."""
    limit: int
    direction: ComparisonDirection


def evaluate_integer(
    module: Module, computation: Computation, name: str, parameters: Sequence[SymbolicValue]
) -> SymbolicValue:
    """Return the value of instruction `name`, given the `parameters` of its computation; None if unknown.

    >>> from shardplan.verify.hlo.parser import parse
    >>> module = parse('''ENTRY %main (n: s32[]) -> s32[] {
    ...   %n = s32[] parameter(0)
    ...   %two = s32[] constant(2)
    ...   ROOT %sum = s32[] add(%n, %two)
    ... }''')
    >>> evaluate_integer(module, module.entry, "sum", parameters=[SymbolicInt(slot=0, offset=0)])
    SymbolicInt(slot=0, offset=2)
    """
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None

    def operand(i: int) -> SymbolicValue:
        return evaluate_integer(module, computation, instruction.operands[i], parameters)

    opcode = instruction.opcode
    if opcode not in _STRUCTURE and any(array.dims for array in instruction.arrays):
        return None  # only scalars count loops
    if opcode == "constant":
        text = instruction.operands[0]
        return SymbolicInt(None, int(text)) if text.lstrip("-").isdigit() else None
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
        return _compute(opcode, operand(0), operand(1))
    if opcode in ("fusion", "call") and instruction.called:
        inner = module.computations[instruction.called[0]]
        return evaluate_integer(module, inner, inner.root.name, [operand(i) for i in range(len(instruction.operands))])
    return None


def trip_count(
    module: Module, computation: Computation, loop: Instruction, parameters: Sequence[SymbolicValue]
) -> tuple[int | None, list[SymbolicValue]]:
    """Return the number of iterations of `loop` (a `while` in `computation`), and the known parameters of its body.

    The number is known if the loop variable starts at a constant, the body adds a constant, and the condition compares
    the variable with a constant; each constant may come from outside through the loop's tuple. For all other loops the
    number is None.
    """
    start = evaluate_integer(module, computation, loop.operands[0], parameters)
    if not isinstance(start, list):
        return None, []
    body = module.computations[split_names(loop.attributes["body"])[0]]
    condition = module.computations[split_names(loop.attributes["condition"])[0]]
    slots: list[SymbolicValue] = [SymbolicInt(slot, 0) for slot in range(len(start))]
    after = evaluate_integer(module, body, body.root.name, [slots])
    if not isinstance(after, list):
        return None, []
    # an element that the body returns unchanged keeps its initial value; all others stay symbolic
    constant = [new == slot for new, slot in zip(after, slots, strict=True)]
    inside = [first if same else None for first, same in zip(start, constant, strict=True)]
    symbolic = [
        first if same and first is not None else slot for first, same, slot in zip(start, constant, slots, strict=True)
    ]
    steps = evaluate_integer(module, body, body.root.name, [symbolic])
    loop_condition = _find_condition(module, condition, condition.root, [symbolic])
    if loop_condition is None or not isinstance(steps, list):
        return None, [inside]
    return _count(loop_condition, start[loop_condition.slot], steps[loop_condition.slot]), [inside]


def _find_condition(
    module: Module, computation: Computation, root: Instruction, parameters: Sequence[SymbolicValue]
) -> _LoopCondition | None:
    """Return the comparison at `root`, possibly in a fusion; None unless it compares a loop variable and a constant."""
    operands = [evaluate_integer(module, computation, name, parameters) for name in root.operands]
    if root.opcode == "fusion":
        inner = module.computations[root.called[0]]
        return _find_condition(module, inner, inner.root, operands)
    if root.opcode in SAME_VALUE:
        return _find_condition(module, computation, computation.instructions[root.operands[0]], parameters)
    if root.opcode != "compare":
        return None
    left, right = operands
    if not isinstance(left, SymbolicInt) or not isinstance(right, SymbolicInt):
        return None
    direction = ComparisonDirection(root.attributes["direction"])
    if left.slot is not None and right.slot is None:
        return _LoopCondition(left.slot, left.offset, right.offset, direction)
    if right.slot is not None and left.slot is None:
        return _LoopCondition(right.slot, right.offset, left.offset, _MIRRORED[direction])
    return None


def _count(condition: _LoopCondition, start: SymbolicValue, step: SymbolicValue) -> int | None:
    """Return the number of iterations from `start` in increments of `step`; None if unknown."""
    if not isinstance(start, SymbolicInt) or start.slot is not None or not isinstance(step, SymbolicInt):
        return None
    if step.slot != condition.slot or step.offset == 0:
        return None
    direction = condition.direction
    # LE and GE include the limit
    distance = condition.limit - (start.offset + condition.delta) + (direction == _LE) - (direction == _GE)
    if direction == _EQ or (direction == _NE and distance % step.offset):
        return None
    rising = direction in (_LT, _LE) or (direction == _NE and distance > 0)
    if distance == 0 or (distance > 0) != rising:
        return 0
    return -(-distance // step.offset) if (step.offset > 0) == rising else None


def _compute(opcode: str, left: SymbolicValue, right: SymbolicValue) -> SymbolicValue:
    """Return the result of an operation on two values; None unless the result is a parameter plus a constant."""
    if not isinstance(left, SymbolicInt) or not isinstance(right, SymbolicInt):
        return None
    if opcode == "add" and (left.slot is None or right.slot is None):
        return SymbolicInt(left.slot if right.slot is None else right.slot, left.offset + right.offset)
    if opcode == "subtract" and right.slot is None:
        return SymbolicInt(left.slot, left.offset - right.offset)
    if opcode == "multiply" and left.slot is None and right.slot is None:
        return SymbolicInt(None, left.offset * right.offset)
    return None
