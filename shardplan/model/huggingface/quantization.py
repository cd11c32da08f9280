"""The quantized forms in which checkpoints store weights.

Which tensors are stored so, the files say; `Quantization.is_plain` must agree.
"""

import re
from dataclasses import dataclass
from functools import cached_property

NOTHING = "(?!)"
"""A regular expression that fits nothing."""
PATTERN = "re:"
"""What a regular expression begins with in a list of modules."""


@dataclass(frozen=True)
class Quantization:
    """The stored form of a checkpoint's weights."""

    method: str
    """What it is called in messages."""
    plain_modules: tuple[str, ...]
    """Modules that are stored as plain numbers: parts of names, with `*` for anything, or `re:` and a pattern."""

    def is_plain(self, name: str) -> bool:
        """Whether config.json says that a tensor is stored as plain numbers.

        >>> Quantization("mxfp4", ("model.layers.*.mlp.gate", "lm_head")).is_plain("model.layers.3.mlp.gate.weight")
        True
        """
        return self._plain_pattern.search(name.removesuffix(".weight")) is not None

    @cached_property
    def _plain_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(_pattern_of, self.plain_modules)) or NOTHING)


@dataclass(frozen=True)
class ByteCodes(Quantization):
    """Numbers or integers of eight bits with scales of blocks, rows, matrices or tensors."""

    dtype: str
    """Type of the stored numbers."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None if a tensor, or each of its rows, has one."""


@dataclass(frozen=True)
class Mxfp4(Quantization):
    """4-bit floats with a power-of-two scale per 32 elements (gpt-oss)."""


@dataclass(frozen=True)
class Nvfp4Names:
    """The suffixes of the parts of a weight, after its module's name."""

    codes: str
    group_scale: str
    tensor_scale: str
    divides: bool
    """Whether scales of groups are divided by that of the tensor."""


@dataclass(frozen=True)
class Nvfp4(Quantization):
    """4-bit floats with an 8-bit scale per 16 elements and one more scale per tensor."""

    names: Nvfp4Names


@dataclass(frozen=True)
class PackedIntegers(Quantization):
    """Integers of four or eight bits in words of 32 bits, with scales of groups of a row (compressed-tensors)."""

    bits: int
    group: int | None
    """Columns that share a scale; None for all of a row."""
    is_symmetric: bool
    """Whether zero points are in the middle, and not stored."""


@dataclass(frozen=True)
class Awq(Quantization):
    """Integers of four bits with scales and zero points of groups of inputs, in the order of AWQ's kernel."""

    group: int | None
    """Inputs that share a scale; None for all."""


@dataclass(frozen=True)
class Gptq(Quantization):
    """Integers with scales and zero points of groups of inputs."""

    bits: int
    group: int | None
    """Inputs that share a scale; None for all."""
    zero_offset: int
    """What is added to stored zero points."""
    has_order: bool
    """Whether inputs are in the order of their activations (act-order)."""


def _pattern_of(part: str) -> str:
    """Return a regular expression for the modules that an entry of `plain_modules` stands for."""
    if part.startswith(PATTERN):
        return rf"^(?:{part.removeprefix(PATTERN)})"
    names = ".*".join(map(re.escape, part.split("*")))
    return rf"(?:^|\.){names}(?:\.|$)"
