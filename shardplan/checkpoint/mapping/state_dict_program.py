"""The state-dict program: Levanter's own converter, traced, as views of the checkpoint's tensors.

`from_torch_compatible_state_dict` over abstract arrays is a program of pure data movement. Interpreting its jaxpr with
`shardplan.checkpoint.mapping.views` in place of values gives, for every array of the model, the elements of checkpoint
tensors that it is made of. So every model Levanter can convert can be streamed, stacked layers included.

shardplan's own decoder has rules in place of a converter, and is not traced.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax.jax_utils import is_jax_array_like
from haliax.state_dict import flatten_modules_for_export, from_torch_compatible_state_dict, to_state_dict
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from shardplan.checkpoint.mapping.code_views import first_of_blocks
from shardplan.checkpoint.mapping.views import Shape, View, concatenate, stack, tensor_view
from shardplan.decoder.families import family_of
from shardplan.decoder.model import Decoder, expected_shapes
from shardplan.decoder.names import StoredTensor, evaluate
from shardplan.decoder.parameter_rules import parameter_rules, stored_constants
from shardplan.errors import CheckpointError
from shardplan.model.dtypes.kept_weights import CODES, SCALES, owner_of
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER_CLASSES
from shardplan.model.registry import name_of_class


@dataclass(frozen=True)
class StateDictProgram:
    """The mapping from checkpoint tensors to the arrays of a model."""

    tensors: Mapping[str, Shape]
    """Checkpoint tensors that the model is made of: name -> shape."""
    views: Mapping[str, View]
    """Array path in the model (as in `shardplan.model.inspect`) -> view of the tensor elements that make it up."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Name -> value of the scalars that a checkpoint stores and the model uses as constants."""

    def rename(self, names: Mapping[str, str]) -> "StateDictProgram":
        """Return the program with renamed tensors.

        Args:
            names: name -> new name; tensors that are not in it keep theirs.
        """

        def rename(name: str) -> str:
            return names.get(name, name)

        tensors = {rename(name): shape for name, shape in self.tensors.items()}
        constants = {rename(name): value for name, value in self.constants.items()}
        return StateDictProgram(tensors, {path: view.rename(rename) for path, view in self.views.items()}, constants)


def expected_tensors(template: Any) -> dict[str, Shape]:
    """Return name -> shape of the tensors that the converter of `template` writes, without prefix.

    >>> axes = hax.Axis("vocab", 16), hax.Axis("embed", 8)
    >>> wte = hax.nn.Embedding(hax.NamedArray(jax.ShapeDtypeStruct((16, 8), np.float32), axes), *axes)
    >>> expected_tensors({"wte": wte})
    {'wte.weight': (16, 8)}
    """
    if isinstance(template, Decoder):
        return expected_shapes(template)
    arrays = eqx.filter(template, is_jax_array_like)
    state = eqx.filter_eval_shape(lambda tree: to_state_dict(flatten_modules_for_export(tree)), arrays)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def dispensable_tensors(template: Any) -> tuple[str, ...]:
    """Return parts of names of layer tensors that the model does not need; empty for Levanter's models."""
    return family_of(template.settings).dispensable if isinstance(template, Decoder) else ()


def stores_inputs_first(template: Any) -> bool:
    """Return whether a model stores the weights of linear layers, except its output head, as {inputs, outputs}.

    >>> from types import SimpleNamespace
    >>> from levanter.models.gpt2 import Gpt2Config
    >>> from levanter.models.llama import LlamaConfig
    >>> [stores_inputs_first(SimpleNamespace(config=config)) for config in (Gpt2Config(), LlamaConfig())]
    [True, False]
    """
    if isinstance(template, Decoder):
        return family_of(template.settings).stores_inputs_first
    return name_of_class(type(template.config)) == LEVANTER_CLASSES["gpt2"]


def trace_program(
    template: Any,
    tensors: Mapping[str, Shape] | None = None,
    stored: Mapping[str, View] | None = None,
) -> StateDictProgram:
    """Trace the conversion of a checkpoint that holds `tensors`.

    >>> axes = hax.Axis("vocab", 16), hax.Axis("embed", 8)
    >>> wte = hax.nn.Embedding(hax.NamedArray(jax.ShapeDtypeStruct((16, 8), np.float32), axes), *axes)
    >>> program = trace_program({"wte": wte}, {"wte.weight": (16, 8)})
    >>> [(path, view.shape, view.tensors) for path, view in program.views.items()]
    [("['wte'].weight", (16, 8), ('wte.weight',))]

    Args:
        template: the Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        tensors: name in the checkpoint -> shape; `expected_tensors` by default.
        stored: name -> view of the stored elements, for tensors that are stored in another order.

    Raises:
        CheckpointError: the converter computes something other than data movement, does not read these names, or
            leaves an array of the model unfilled by the checkpoint.
    """
    shapes = expected_tensors(template) if tensors is None else tensors
    views_of = {name: tensor_view(name, shape) for name, shape in shapes.items()} | dict(stored or {})
    if isinstance(template, Decoder):
        return _decoder_program(template, shapes, views_of)
    state = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    paths: list[str] = []

    def convert(state_dict: dict[str, jax.Array]) -> list[jax.Array]:
        model = from_torch_compatible_state_dict(template, state_dict)
        leaves = list(named_leaves(model))
        paths.extend(path for path, _ in leaves)
        return [leaf.array if isinstance(leaf, hax.NamedArray) else leaf for _, leaf in leaves]

    try:
        traced = jax.make_jaxpr(convert)(state)
    except KeyError as error:
        raise CheckpointError(f"Levanter's converter needs a tensor {error}") from error
    # make_jaxpr flattens the dictionary in sorted order of its keys
    inputs: list[Value] = [views_of[name] for name in sorted(shapes)]
    results = _interpret(traced.jaxpr, traced.consts, inputs)
    views: dict[str, View] = {}
    for path, view in zip(paths, results, strict=True):
        if not isinstance(view, View) or not view.is_complete:
            raise CheckpointError(f"{path}: Levanter's converter does not fill it from the checkpoint")
        views[path] = view
    return StateDictProgram(shapes, views)


def _decoder_program(
    template: Decoder, tensors: Mapping[str, Shape], stored_views: Mapping[str, View]
) -> StateDictProgram:
    """Make the program of a decoder from its rules, by computing with views instead of tracing.

    The scales of a kept weight have a view of the first element of each block of the weight's tensors.
    """

    def read(stored: StoredTensor) -> View:
        name = stored.name
        if name not in tensors:
            raise CheckpointError(f"the decoder needs a tensor {name!r}")
        if tuple(tensors[name]) != stored.shape:
            raise CheckpointError(f"{name} has the shape {tuple(tensors[name])}, and the decoder needs {stored.shape}")
        return stored_views[name]

    rules = parameter_rules(template.settings, template.Vocab.size)
    constants = stored_constants(template.settings)
    views = {}
    leaves = dict(named_leaves(template))
    for path, leaf in leaves.items():
        view = evaluate(rules[owner_of(path)], read, VIEWS)
        if path.endswith(SCALES):
            weight = leaves[owner_of(path) + CODES]
            views[path] = first_of_blocks(view.reshape(weight.array.shape), leaf.array.shape)
        else:
            views[path] = view.reshape(leaf.array.shape)
    return StateDictProgram(tensors, views, constants)


class _Views:
    """The operations on views that a decoder's loading rules use."""

    def reshape(self, value: View, shape: Shape) -> View:
        return value.reshape(shape)

    def transpose(self, value: View, permutation: Sequence[int]) -> View:
        return value.transpose(permutation)

    def slice(self, value: View, dimension: int, start: int, stop: int) -> View:
        first, last = [0] * len(value.shape), list(value.shape)
        first[dimension], last[dimension] = start, stop
        return value.slice(tuple(first), tuple(last))

    def concatenate(self, values: Sequence[View], dimension: int) -> View:
        return concatenate(values, dimension)

    def stack(self, values: Sequence[View]) -> View:
        return stack(values, 0)


VIEWS = _Views()


Value = View | np.ndarray
"""A value of the program: data of the checkpoint, or a constant."""


def _interpret(jaxpr: Jaxpr, consts: list[Any], inputs: list[Value]) -> list[Value]:
    """Interpret a jaxpr whose inputs are data of the checkpoint, and return its results."""
    values: dict[Any, Value] = {}
    values.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Value:
        return np.asarray(atom.val) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _apply(equation, operands), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Interpret one equation of a jaxpr, and return its results.

    If no operand comes from the checkpoint, the results are a broadcast scale factor, or empty views.

    Raises:
        CheckpointError: the equation does more than move or scale data of the checkpoint.
    """
    name = equation.primitive.name
    if "jaxpr" in equation.params:  # a wrapped program: jit, custom_jvp, ...
        inner = equation.params["jaxpr"]
        return _interpret(inner.jaxpr, inner.consts, operands)
    if not any(isinstance(operand, View) for operand in operands):
        # A constant is either a scale factor (a scalar) or the zeros that stand for an array until the checkpoint
        # replaces it. Only the shape of the zeros matters, so they are never materialised.
        constant = operands[0] if operands else None
        if name == "broadcast_in_dim" and isinstance(constant, np.ndarray) and np.any(constant != 0):
            return [np.broadcast_to(constant, equation.params["shape"])]
        return [View(tuple(out.aval.shape)) for out in equation.outvars]
    if name == "split":
        return _split(operands[0], equation.params["sizes"], equation.params["axis"])
    if name not in _DATA_MOVEMENT:
        raise CheckpointError(
            f"Levanter's converter uses {name!r}, which is not data movement; this model cannot be streamed"
        )
    return [_DATA_MOVEMENT[name](operands, equation.params)]


def _scale(operands: list[Value], invert: bool) -> View:
    view, factor = operands if isinstance(operands[0], View) else operands[::-1]
    constants = np.unique(factor) if isinstance(factor, np.ndarray) else np.zeros(0)
    if not isinstance(view, View) or len(constants) != 1 or (invert and view is not operands[0]):
        raise CheckpointError("Levanter's converter multiplies tensors with each other; this model cannot be streamed")
    return view.scale(1 / float(constants[0]) if invert else float(constants[0]))


def _slice(view: View, params: Mapping[str, Any]) -> View:
    if params["strides"] is not None and any(step != 1 for step in params["strides"]):
        raise CheckpointError("Levanter's converter slices with a stride above 1; this model cannot be streamed")
    return view.slice(tuple(params["start_indices"]), tuple(params["limit_indices"]))


def _split(view: Any, sizes: Sequence[int], axis: int) -> list[Value]:
    """Split `view` along dimension `axis` into parts of `sizes`."""
    ends = itertools.accumulate(sizes)
    bounds = ((end - size, end) for size, end in zip(sizes, ends, strict=True))
    return [
        view.slice(
            tuple(start if d == axis else 0 for d in range(len(view.shape))),
            tuple(end if d == axis else n for d, n in enumerate(view.shape)),
        )
        for start, end in bounds
    ]


_DATA_MOVEMENT: dict[str, Callable[[list[Any], Mapping[str, Any]], View]] = {
    "broadcast_in_dim": lambda args, p: args[0].broadcast(tuple(p["shape"]), p["broadcast_dimensions"]),
    "concatenate": lambda args, p: concatenate(args, p["dimension"]),
    "convert_element_type": lambda args, p: args[0],
    "copy": lambda args, p: args[0],
    "div": lambda args, p: _scale(args, invert=True),
    "mul": lambda args, p: _scale(args, invert=False),
    "reshape": lambda args, p: args[0].reshape(tuple(p["new_sizes"])),
    "reshard": lambda args, p: args[0],
    "sharding_constraint": lambda args, p: args[0],
    "slice": lambda args, p: _slice(args[0], p),
    "squeeze": lambda args, p: args[0].reshape(
        tuple(n for d, n in enumerate(args[0].shape) if d not in p["dimensions"])
    ),
    "stack": lambda args, p: stack(args, p["axis"]),
    "transpose": lambda args, p: args[0].transpose(p["permutation"]),
}
"""Primitive name -> the same data movement on views."""
