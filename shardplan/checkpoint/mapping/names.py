"""Finds a model's tensors in a checkpoint whose names have other prefixes, added by wrappers or left out.

A checkpoint is saved from a module around the model (`_orig_mod.`, `module.`, `language_model.`), from the model inside
of it (`embed_tokens.weight` for `model.embed_tokens.weight`), or from a multimodal one
(`model.language_model.embed_tokens.weight`). So one prefix of all tensors but the output head is looked for: the one
under which most of the expected tensors are found, with their shapes. The head is in that module, or in one around it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError

HEADS = ("lm_head.", "embed_out.")
"""Beginnings of the names of an output head within its module; the second one is GPT-NeoX's."""
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
"""Modules that torch.compile, FSDP, activation checkpointing and Lightning wrap around others, at any depth."""


class StoredShape(Protocol):
    """Any object that has the shape of a stored tensor."""

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""


@dataclass(frozen=True)
class StoredNames:
    """A checkpoint's names of the tensors that a model expects."""

    names: Mapping[str, str]
    """Expected name -> name in the checkpoint, for the tensors that the checkpoint has."""
    prefixed: Mapping[str, str]
    """Expected name -> the name that the checkpoint has, or would have, for the tensor."""
    canonical: Mapping[str, str]
    """Name in the checkpoint -> the model's own name for the tensor."""
    head_module: str
    """The module in which the checkpoint has, or would have, its output head."""
    head: str | None
    """Name in the checkpoint of the output head's weight; None if it has none."""


def find_stored_names(expected: Mapping[str, Shape], stored: Mapping[str, StoredShape], where: str) -> StoredNames:
    """Find the expected tensors of a model among the stored ones.

    >>> class Matrix:
    ...     shape = (4, 2)
    >>> names = find_stored_names({"model.norm.weight": (4, 2)}, {"_orig_mod.model.norm.weight": Matrix()}, "here")
    >>> names.names
    {'model.norm.weight': '_orig_mod.model.norm.weight'}

    Args:
        expected: name -> shape of the tensors of the model.
        stored: name -> tensor.
        where: name of the checkpoint, for messages.

    Raises:
        CheckpointError: two sets of weights under different prefixes, or two tensors whose names differ in wrappers.
    """
    plain = _without_wrappers(stored, where)
    base = _base_prefix(expected)
    inner = {name.removeprefix(base): name for name in expected if not name.startswith(HEADS)}
    prefix = _find_prefix(inner, expected, {name: stored[own].shape for name, own in plain.items()}, base, where)
    prefixed = {name: prefix + rest for rest, name in inner.items()}
    module, head = _find_head(expected, plain, prefix)
    prefixed |= {name: module + name for name in expected if name.startswith(HEADS)}
    canonical = {}
    for name, own in plain.items():
        if name.startswith(module + head):
            canonical[own] = name.removeprefix(module)
        else:
            canonical[own] = base + name.removeprefix(prefix) if name.startswith(prefix) else name
    names = {name: plain[each] for name, each in prefixed.items() if each in plain}
    return StoredNames(names, prefixed, canonical, module + head.rstrip("."), plain.get(f"{module}{head}weight"))


def _without_wrappers(stored: Mapping[str, StoredShape], where: str) -> dict[str, str]:
    """Return name without wrappers -> name in the checkpoint."""
    plain: dict[str, str] = {}
    for own in stored:
        name = own
        if any(wrapper in own for wrapper in WRAPPERS):
            name = ".".join(part for part in own.split(".") if part not in WRAPPERS)
        if plain.setdefault(name, own) != own:
            raise CheckpointError(
                f"{where} holds both {plain[name]} and {own}, which are one tensor of the model; remove one of the two"
            )
    return plain


def _base_prefix(expected: Mapping[str, Shape]) -> str:
    """Return the module that contains all expected tensors but the output head, such as `model.`; else ""."""
    body = [name for name in expected if not name.startswith(HEADS)]
    first = {name.partition(".")[0] for name in body}
    return f"{first.pop()}." if len(first) == 1 and all("." in name for name in body) else ""


def _find_prefix(
    inner: Mapping[str, str], expected: Mapping[str, Shape], shapes: Mapping[str, Shape], base: str, where: str
) -> str:
    """Return the checkpoint's prefix for the names of `inner`: the one with most tensors of the expected shapes.

    Args:
        inner: name without the prefix `base` -> expected name.
        shapes: shapes of the stored tensors.
    """
    if all(shapes.get(base + rest) == expected[name] for rest, name in inner.items()):
        return base
    found: Counter[str] = Counter()
    fitting: Counter[str] = Counter()
    for name, shape in shapes.items():
        parts = name.split(".")
        for i in range(len(parts)):
            rest = ".".join(parts[i:])
            if rest in inner:
                prefix = name.removesuffix(rest)
                found[prefix] += 1
                fitting[prefix] += tuple(shape) == expected[inner[rest]]
    if not found or fitting[base] == len(inner):
        return base
    best = max((fitting[prefix], found[prefix]) for prefix in found)
    choices = sorted(prefix for prefix in found if (fitting[prefix], found[prefix]) == best)
    if base in choices:
        return base
    if len(choices) > 1 and best[0] == len(inner):
        raise CheckpointError(
            f"{where} holds {len(choices)} sets of weights of this model, whose names begin with "
            f"{' and '.join(map(repr, choices))}; keep the one that is meant"
        )
    return min(choices, key=len)


def _find_head(expected: Mapping[str, Shape], plain: Mapping[str, str], prefix: str) -> tuple[str, str]:
    """Return the checkpoint's name for the module with the output head, and the head's name, one of `HEADS`.

    Args:
        plain: mapping whose keys are the names of stored tensors.
        prefix: prefix of the other names in the checkpoint.
    """
    heads = [head for head in HEADS if any(name.startswith(head) for name in expected)] or HEADS
    modules = _head_prefixes(prefix)
    for module in modules:
        for head in heads:
            if f"{module}{head}weight" in plain:
                return module, head
    return modules[-1], heads[0]


def _head_prefixes(prefix: str) -> list[str]:
    """Return the modules that may contain the output head, from the innermost to the outermost.

    >>> _head_prefixes("language_model.model.")
    ['language_model.model.', 'language_model.', '']
    """
    parts = prefix.split(".")[:-1]
    return ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts), -1, -1)]
