"""Classifies checkpoint tensors that the model does not have: unneeded ones, and ones that would change its results.

| tensor | |
|---|---|
| a weight or bias of a module that the model has, or inside one of its blocks | refused |
| scales and packed numbers of quantised weights, an adapter that is not merged | refused |
| blocks as the model has them, beyond its last one | refused |
| what the family of the decoder says it does without, such as the indexer of sparse attention | ignored, and said |
| anything else: vision towers, further prediction heads, states of optimizers, scales of caches | ignored, and said |
| constants that every implementation computes anew | ignored |
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

QUANTISATION_SUFFIXES = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale", ".qweight", ".qzeros", ".scales", ".g_idx",
    ".SCB", ".weight_packed", ".weight_shape", ".weight.absmax", ".weight.quant_map",
)  # fmt: skip
"""Endings of tensors that quantisers save beside or instead of weights: scales, zero points, packed numbers."""
MASKED_BIAS = ".masked_bias"
"""Ending of the name of a saved constant, the score of masked pairs; the `bias` beside it is a causal mask."""
BUFFER_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", MASKED_BIAS)
"""Endings of constants that older versions of transformers saved and that every implementation computes anew."""
ADAPTER_PARTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "base_layer"})
"""Modules that PEFT puts into a model for an adapter."""
PARAMETERS = ("weight", "bias")
"""Names of parameters within their modules."""
MAX_KINDS = 6
"""Maximum number of kinds of tensors that a message names."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Pattern for a number in a tensor's name, such as a block's number."""
BLOCK = re.compile(r"(.*?\.|)(\d+)\.(.*)")
"""Pattern for the name of a tensor in a block: prefix, number of the block, name within the block."""


@dataclass(frozen=True)
class UnexpectedTensors:
    """The tensors of a checkpoint that the model does not have."""

    unneeded: tuple[str, ...] = ()
    """Names of tensors that the model can do without."""
    foreign: tuple[str, ...] = ()
    """Names of tensors that change what a model computes."""
    advice: str = ""
    """Advice on the foreign tensors; empty if there is none."""


def classify_unexpected(
    unexpected: Collection[str],
    expected: Iterable[str],
    modules: Iterable[str] = (),
    dispensable: Collection[str] = (),
) -> UnexpectedTensors:
    """Classify the tensors that a model does not have as unneeded or foreign.

    >>> names = ["model.layers.0.mlp.gate.bias", "model.layers.0.mlp.k_scale", "vision.weight"]
    >>> classify_unexpected(names, ["model.layers.0.mlp.gate.weight"]).unneeded
    ('model.layers.0.mlp.k_scale', 'vision.weight')

    Args:
        expected: names of the tensors that the model has, as the checkpoint names them.
        modules: further modules that the model has, without parameters of its own.
        dispensable: parts of names of tensors in the model's blocks that the model does not need.
    """
    own_modules = {name.rpartition(".")[0] for name in expected} | {*modules}
    own_blocks: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in expected:
        if match := BLOCK.fullmatch(name):
            own_blocks[match[1]][match[2]].add(match[3])
    present = set(unexpected)
    further = _further_blocks(unexpected, own_blocks)
    unneeded: list[str] = []
    foreign: list[str] = []
    quantised: list[str] = []
    adapters: list[str] = []
    for name in sorted(unexpected):
        module, _, leaf = name.rpartition(".")
        if name.endswith(BUFFER_SUFFIXES) or (leaf == "bias" and f"{module}{MASKED_BIAS}" in present):
            continue
        if any(part in name for part in dispensable):
            unneeded.append(name)
            continue
        match = BLOCK.fullmatch(name)
        is_inside = match is not None and match[2] in own_blocks.get(match[1], ())
        is_quantised = name.endswith(QUANTISATION_SUFFIXES) and (is_inside or module in own_modules)
        is_adapter = not ADAPTER_PARTS.isdisjoint(name.split("."))
        if is_quantised:
            quantised.append(name)
        elif is_adapter:
            adapters.append(name)
        is_parameter = leaf in PARAMETERS and (is_inside or module in own_modules)
        is_further = match is not None and (match[1], match[2]) in further
        (foreign if is_quantised or is_adapter or is_parameter or is_further else unneeded).append(name)
    advice = ""
    if quantised:
        advice = f"it is quantised ({quantised[0]}): use one in bfloat16, or dequantise it first"
    elif adapters:
        advice = f"it holds an adapter that is not merged ({adapters[0]}): merge it with PEFT first (merge_and_unload)"
    elif further:
        advice = "it has more layers than its config.json says"
    return UnexpectedTensors(tuple(unneeded), tuple(foreign), advice)


def _further_blocks(
    unexpected: Iterable[str], own_blocks: defaultdict[str, defaultdict[str, set[str]]]
) -> set[tuple[str, str]]:
    """Return (prefix, number) of blocks beyond the model's own that have only tensors of kinds in its own blocks."""
    blocks: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for name in unexpected:
        match = BLOCK.fullmatch(name)
        if match and match[1] in own_blocks and match[2] not in own_blocks[match[1]]:
            blocks[match[1], match[2]].add(match[3])
    return {
        (prefix, number)
        for (prefix, number), names in blocks.items()
        if names <= set().union(*own_blocks[prefix].values())
    }


def kinds_text(names: Sequence[str]) -> str:
    """Count tensors by kind of name, with N in place of numbers.

    >>> kinds_text(["layers.0.k_scale", "layers.1.k_scale", "mtp.fc.weight"])
    '2 x layers.N.k_scale, mtp.fc.weight'

    If there would be too many kinds, only the first modules of each name count.
    """
    depth = max(name.count(".") + 1 for name in names)
    kinds = _kinds(names, depth)
    while len(kinds) > MAX_KINDS and depth > 1:
        depth -= 1
        kinds = _kinds(names, depth)
    shown = []
    for numbered in sorted(kinds.values(), key=len, reverse=True)[:MAX_KINDS]:
        same = set(numbered)
        kind = numbered[0] if len(same) == 1 else NUMBER.sub("N", numbered[0])
        shown.append(kind if len(numbered) == 1 else f"{len(numbered)} x {kind}")
    return ", ".join(shown) + (f", and {len(kinds) - MAX_KINDS} more kinds" if len(kinds) > MAX_KINDS else "")


def _kinds(names: Sequence[str], depth: int) -> dict[str, list[str]]:
    """Return kind -> names of this kind; names keep their first `depth` parts, and kinds have N for numbers."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        short = name if len(parts) <= depth else ".".join([*parts[:depth], "*"])
        kinds[NUMBER.sub("N", short)].append(short)
    return kinds
