"""Parses the text of a compiled HLO module.

The grammar is small: a computation is a header, one line per instruction, and a closing brace; an instruction is
`%name = SHAPE opcode(OPERANDS), key=value, ...`. Lines are split at commas outside of brackets and quotes.
"""

import re
from collections.abc import Iterator

from shardplan.verify.hlo.module import ArrayShape, Computation, HloError, Instruction, Module, split_integers

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|->|[()\[\]{},]')
"""Pattern for the tokens that structure a line: quoted texts, comments, arrows, brackets and commas."""
_SPACE = re.compile(r"S\((\d+)\)")


def parse(text: str) -> Module:
    """Parse the module that `text` describes.

    >>> text = '''ENTRY %main (p: f32[4]) -> f32[4] {
    ...   %p = f32[4]{0} parameter(0)
    ...   ROOT %sum = f32[4]{0} add(%p, %p)
    ... }'''
    >>> [(each.name, each.opcode, each.operands) for each in parse(text).entry.instructions.values()]
    [('p', 'parameter', ('0',)), ('sum', 'add', ('p', 'p'))]

    Raises:
        HloError: there is no entry computation, or a line inside of a computation is not an instruction.
    """
    computations: dict[str, Computation] = {}
    entry = None
    for header, body in _split_computations(text):
        name = header.removeprefix("ENTRY ").partition(" ")[0].removeprefix("%")
        try:
            instructions = [_parse_instruction(line.removeprefix("ROOT ")) for line in body]
            by_name = _with_elements(instructions)
        except (ValueError, LookupError) as error:
            raise HloError(f"computation {name}: {error}") from error
        roots = [i for i, line in zip(instructions, body, strict=True) if line.startswith("ROOT ")]
        if len(roots) != 1:
            raise HloError(f"computation {name} has {len(roots)} roots")
        computations[name] = Computation(name, by_name, roots[0])
        if header.startswith("ENTRY "):
            entry = computations[name]
    if entry is None:
        raise HloError("no entry computation")
    return Module(computations, entry)


def _split_computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the header and the instruction lines of every computation."""
    header, body = None, list[str]()
    for line in text.splitlines():
        if header is None:
            if line.endswith("{") and "->" in line and not line.startswith("HloModule"):
                header, body = line, []
        elif line == "}" or (line.startswith("}, ") and not (body and _is_open(body[-1]))):
            yield header, body
            header = None
        elif line.lstrip().startswith(("%", "ROOT ")) or not body:
            body.append(line.strip())
        else:
            body[-1] += line  # attributes of kernels may contain line breaks


def _is_open(line: str) -> bool:
    """Return whether a bracket or quote of an instruction is still open, so that it continues on the next line."""
    tokens = [match[0] for match in _TOKENS.finditer(line)]
    depth = sum((token in "([{") - (token in ")]}") for token in tokens)
    return depth > 0 or _TOKENS.sub("", line).count('"') > 0


def _parse_instruction(line: str) -> Instruction:
    """Parse `%name = shape opcode(operands), key=value, ...`.

    Raises:
        HloError: the line is not an instruction.
    """
    name, equals, rest = line.partition(" = ")
    end = _closing_bracket(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", end)
    if not equals or end <= 0 or opening < 0:
        raise HloError(f"not an instruction: {line[:120]}")
    closing = _closing_bracket(rest, opening)
    opcode, inner = rest[end:opening].strip(), rest[opening + 1 : closing]
    if opcode in ("constant", "parameter"):
        operands = [inner.strip()]
    else:
        # an operand may have its shape before its name
        operands = [part.split(" ")[-1].removeprefix("%") for part in _split(inner)]
    attributes: dict[str, str] = {}
    for part in _split(rest[closing + 1 :]):
        key, _, value = part.partition("=")
        if key == "device_ids":  # the replica groups contain a comma of their own before device_ids
            attributes["replica_groups"] += f", {part}"
        else:
            attributes[key] = value
    return Instruction(name.removeprefix("%"), opcode, tuple(_parse_shape(rest[:end])), tuple(operands), attributes)


def _with_elements(instructions: list[Instruction]) -> dict[str, Instruction]:
    """Return name -> instruction, with an instruction for each tuple element that an operand names (`tuple#3`).

    In the text of a module without cycles, operands name tuple elements directly, without instructions that extract
    them.
    """
    by_name: dict[str, Instruction] = {}
    for instruction in instructions:
        if instruction.opcode not in ("constant", "parameter"):
            for operand in instruction.operands:
                name, mark, index = operand.partition("#")
                if mark and operand not in by_name:
                    array = by_name[name].arrays[int(index)]
                    by_name[operand] = Instruction(operand, "get-tuple-element", (array,), (name,), {"index": index})
        by_name[instruction.name] = instruction
    return by_name


def _parse_shape(text: str) -> Iterator[ArrayShape]:
    """Yield the leaves of a shape, which is an array or a tuple of shapes."""
    if text.startswith("("):
        for part in _split(text[1:-1]):
            yield from _parse_shape(part)
        return
    dtype, _, rest = text.partition("[")
    dims, _, layout = rest.partition("]")
    space = _SPACE.search(layout)
    # a dimension of dynamic size is written as its bound
    yield ArrayShape(dtype, split_integers(dims.replace("<=", "")), int(space[1]) if space else 0)


def _split(text: str) -> list[str]:
    """Split `text` at the commas outside of brackets and quotes, omitting comments and empty parts."""
    parts, pieces, depth, start = [], [], 0, 0
    for match in _TOKENS.finditer(text):
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


def _closing_bracket(text: str, opening: int) -> int:
    """Return the index of the bracket that closes the bracket at index `opening`."""
    depth = 0
    for match in _TOKENS.finditer(text, opening):
        if match[0] in ("(", "[", "{"):
            depth += 1
        elif match[0] in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return match.start()
    raise HloError(f"unbalanced brackets: {text[:120]}")
