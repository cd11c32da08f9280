"""The tensor names that transformers writes for a model type, if Levanter's converter uses others."""

from collections.abc import Callable, Mapping
from typing import Any

from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram, expected_tensors, trace_program
from shardplan.checkpoint.mapping.views import Shape

BASE_MODELS = {"gpt2": ("transformer", "wte.weight")}
"""Model type -> (prefix that transformers writes before the base model's names and Levanter does not, a name without
prefix that only the base model has)."""
MLP_OF_EXPERTS, MIXTRAL_MLP = ".mlp.", ".block_sparse_moe."
"""Part of the names of Mixtral's experts: as marin-levanter writes it, and as transformers' files have it."""


def trace_type_names(template: Any, model_type: object) -> StateDictProgram:
    """Trace the conversion of a checkpoint whose tensors have the names that transformers writes.

    >>> import haliax as hax
    >>> import jax
    >>> axes = hax.Axis("vocab", 16), hax.Axis("embed", 8)
    >>> wte = hax.nn.Embedding(hax.NamedArray(jax.ShapeDtypeStruct((16, 8), "float32"), axes), *axes)
    >>> trace_type_names({"wte": wte}, "gpt2").tensors
    {'transformer.wte.weight': (16, 8)}

    Args:
        template: the Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        model_type: `model_type` of config.json; a type that is not in the tables has the names that Levanter writes.
    """
    expected = expected_tensors(template)
    if model_type == "mixtral":
        expected = _separate_experts(expected)
    program = trace_program(template, expected)
    prefix, name_of_base = BASE_MODELS.get(str(model_type), ("", ""))
    return _rename(program, lambda name: _add_prefix(name, prefix)) if name_of_base in expected else program


def _separate_experts(tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    """Replace one tensor for all experts of a layer by one tensor for each matrix of each expert."""
    result: dict[str, Shape] = {}
    for name, shape in tensors.items():
        layer, separator, part = name.partition(MLP_OF_EXPERTS)
        if not separator:
            result[name] = shape
            continue
        for expert in range(shape[0] if part.startswith("experts.") else 0):
            stem = f"{layer}{MIXTRAL_MLP}experts.{expert}"
            if part == "experts.gate_up_proj":  # of shape (experts, 2 * mlp, embed)
                half = (shape[1] // 2, shape[2])
                result |= {f"{stem}.w1.weight": half, f"{stem}.w3.weight": half}
            else:
                result[f"{stem}.w2.weight"] = shape[1:]
        if part.startswith("gate."):
            result[f"{layer}{MIXTRAL_MLP}{part}"] = shape
    return result


def _add_prefix(name: str, prefix: str) -> str:
    """Add the prefix to the name of a base model's tensor; the output head is outside of the base model."""
    return name if name.startswith("lm_head.") else f"{prefix}.{name}"


def _rename(program: StateDictProgram, rename: Callable[[str], str]) -> StateDictProgram:
    """Rename every tensor of a program."""

    return StateDictProgram(
        {rename(name): shape for name, shape in program.tensors.items()},
        {path: view.rename(rename) for path, view in program.views.items()},
    )
