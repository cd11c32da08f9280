"""The quantized forms in which checkpoints store weights.

Which tensors are stored so, the files say; `Quantization.is_plain` must agree.
"""

import re
from dataclasses import dataclass
from functools import cached_property

NOTHING = "(?!)"
"""A regular expression that never matches."""
PATTERN = "re:"
"""Prefix that marks a regular expression in a list of modules."""


@dataclass(frozen=True)
class Quantization:
    """The form in which a checkpoint stores weights."""

    method: str
    """Name of the form in messages."""
    plain_modules: tuple[str, ...]
    """Modules stored unquantized: parts of names with `*` for anything, or `re:` and a pattern."""

    def is_plain(self, name: str) -> bool:
        """Return whether config.json says that a tensor is stored unquantized.

        >>> Quantization("mxfp4", ("model.layers.*.mlp.gate", "lm_head")).is_plain("model.layers.3.mlp.gate.weight")
        True
        """
        return self._plain_pattern.search(name.removesuffix(".weight")) is not None

    @cached_property
    def _plain_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_pattern_of, self.plain_modules)) or NOTHING)


@dataclass(frozen=True)
class ByteCodes(Quantization):
    """Eight-bit floats or integers, with scales of blocks, rows, matrices or tensors."""

    dtype: str
    """Type of the codes."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None if each tensor, or each row of it, has one scale."""


@dataclass(frozen=True)
class Mxfp4(Quantization):
    """4-bit floats with a power-of-two scale per 32 elements (gpt-oss)."""


@dataclass(frozen=True)
class Nvfp4Names:
    """Suffixes of the names of a weight's parts, after its module's name."""

    codes: str
    group_scale: str
    tensor_scale: str
    divides: bool
    """Whether the scales of groups are divided by the tensor's scale, rather than multiplied."""


@dataclass(frozen=True)
class Nvfp4(Quantization):
    """4-bit floats with an 8-bit scale per 16 elements and one more scale per tensor."""

    names: Nvfp4Names


@dataclass(frozen=True)
class PackedIntegers(Quantization):
    """Four-bit or eight-bit integers in words of 32 bits, with scales of groups within a row (compressed-tensors)."""

    bits: int
    group: int | None
    """Columns that share a scale; None for a complete row."""
    is_symmetric: bool
    """Whether zero points are in the middle of the range, and not stored."""


@dataclass(frozen=True)
class Awq(Quantization):
    """Four-bit integers with scales and zero points of groups of inputs, in the order of AWQ's kernel."""

    group: int | None
    """Inputs that share a scale; None for all inputs."""


@dataclass(frozen=True)
class Gptq(Quantization):
    """Integers with scales and zero points of groups of inputs."""

    bits: int
    group: int | None
    """Inputs that share a scale; None for all inputs."""
    zero_offset: int
    """Number added to stored zero points."""
    has_order: bool
    """Whether inputs are ordered by their activations (act-order)."""


def _pattern_of(part: str) -> str:
    """Return a regular expression for the modules that an entry of `plain_modules` names."""
    if part.startswith(PATTERN):
        return rf"^(?:{part.removeprefix(PATTERN)})"
    names = ".*".join(map(re.escape, part.split("*")))
    return rf"(?:^|\.){names}(?:\.|$)"
