"""The table of JAX primitives: the rule that names each one's results, and how a compiler treats it.

To add a primitive, add a row to `ROWS`. A primitive without a row is traced as elementwise, and is reported as not
priced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend import core as jex

from shardplan.hardware import CollectiveKind
from shardplan.program.marked.marked_blocks import BLOCK_ATTENTION, BLOCK_GRADIENT
from shardplan.program.marked.marked_conversions import CONVERSION
from shardplan.program.marked.marked_experts import EXPERTS, EXPERTS_GRADIENT
from shardplan.program.marked.marked_sparse import SPARSE_ATTENTION, SPARSE_GRADIENT
from shardplan.program.named_arrays import TracedArray, shape_of
from shardplan.program.naming.axis_naming import AxisNaming, Rule, RuleResult
from shardplan.program.naming.elementwise_rules import (
    broadcast,
    elementwise,
    reduce,
    reshape,
    resize,
    source,
    top_k,
    transpose,
    update_slice,
)
from shardplan.program.naming.expert_rules import experts, experts_gradient
from shardplan.program.naming.lookup_rules import gather, scatter_add
from shardplan.program.naming.matmul_rules import convolve, dot, ragged_dot
from shardplan.program.naming.memory_rules import copy_between_memories
from shardplan.program.naming.sharding_rules import collective, constrain, name_activation
from shardplan.program.naming.sparse_rules import block_attention, block_gradient, sparse_attention, sparse_gradient


@dataclass(frozen=True)
class Primitive:
    """A row of the table: JAX primitives that are treated alike."""

    names: tuple[str, ...]
    rule: Rule | None = elementwise
    """Names the axes of results; None for control flow, whose jaxpr is traced instead."""
    is_view: bool = False
    """Whether the result is a view of the operand, or is recomputed where it is used."""
    is_sum: bool = False
    """Whether the result is the sum of the operands."""
    is_cast: bool = False
    """Whether the result is the operand in another type."""
    is_product: bool = False
    """Whether the operands are multiplied by each other, elementwise if nothing is contracted."""
    is_scaling: bool = False
    """Whether the last operand scales the first; if it is the constant 1, the result is the first operand."""
    is_reduction: bool = False
    """Whether the result combines all elements along a dimension, so that it needs all of them first."""
    is_rewrite: bool = False
    """Whether an array is written in another form; a compiler moves this out of a loop if the array does not change."""
    is_move: bool = False
    """Whether elements are only chosen or moved, not computed."""
    is_slice: bool = False
    """Whether the operation reads only as many elements of the first operand as its result has."""
    is_update: bool = False
    """Whether the second operand is written into the first, and the rest of the first is neither read nor written."""
    ordered_dimensions: str | None = None
    """Name of the equation parameter with the dimensions along which elements are ordered or accumulated."""
    result_dimensions: Callable[[Mapping[str, Any]], Sequence[int]] | None = None
    """Function of an equation's parameters -> for each dimension of the operand, its dimension in the result."""
    approximation: str | None = None
    """Note in plans on the assumed cost of work that the jaxpr does not determine, or that no rule knows."""


ROWS = (
    Primitive((
        "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
        "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "cos", "cosh", "digamma", "eq",
        "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac", "imag",
        "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min",
        "mulhi", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "polygamma", "population_count", "pow",
        "real", "regularized_incomplete_beta", "rem", "round", "rsqrt", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
        "xor",
    )),
    Primitive(("add", "add_any"), is_sum=True),
    Primitive(("mul", "div"), is_scaling=True),
    Primitive(("convert_element_type",), is_cast=True, is_rewrite=True),
    Primitive(("pvary", "reshard", "tie")),
    Primitive(("copy", "copy_p", "optimization_barrier", "reduce_precision", "stop_gradient"), is_view=True),
    Primitive(("layout_constraint",), is_view=True),
    Primitive(("name",), name_activation, is_view=True),
    Primitive(("broadcast_in_dim",), broadcast, is_view=True, result_dimensions=lambda p: p["broadcast_dimensions"]),
    Primitive(
        ("transpose",), transpose, is_view=True, is_rewrite=True,
        result_dimensions=lambda p: np.argsort(p["permutation"]).tolist(),
    ),
    Primitive(("reshape", "squeeze", "expand_dims"), reshape, is_view=True),
    Primitive(("sharding_constraint",), constrain, is_view=True),
    Primitive(("slice",), resize, is_view=True),
    Primitive(("select_n",), is_move=True),
    Primitive(("dynamic_slice",), resize, is_move=True, is_slice=True),
    Primitive(("concatenate", "split"), resize, is_move=True),
    Primitive(("pad",), resize, is_move=True, is_rewrite=True),
    Primitive(("dynamic_update_slice",), update_slice, is_move=True, is_update=True),
    Primitive(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), ordered_dimensions="axis"),
    Primitive(("rev",), ordered_dimensions="dimensions"),
    Primitive(("sort",), ordered_dimensions="dimension"),
    Primitive(("scatter",)),
    Primitive(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"), reduce, is_reduction=True
    ),
    Primitive(("argmax", "argmin"), reduce),
    Primitive(("top_k",), top_k),
    Primitive((
        "iota", "random_bits", "random_seed", "random_wrap", "random_unwrap", "random_fold_in", "random_split",
        "axis_index", "empty", "empty2", "create_token", "platform_index", "rng_bit_generator", "threefry2x32",
    ), source),
    Primitive(("dot_general",), dot, is_product=True),
    Primitive(("ragged_dot_general",), ragged_dot),
    Primitive(
        ("conv_general_dilated",), convolve,
        approximation="convolutions, without the exchange of neighbours along a sharded axis",
    ),
    Primitive(("gather",), gather),
    Primitive(("scatter-add",), scatter_add),
    Primitive(("psum", "psum_invariant", "pmax", "pmin"), collective(CollectiveKind.ALL_REDUCE)),
    Primitive(("all_gather", "all_gather_invariant"), collective(CollectiveKind.ALL_GATHER)),
    Primitive(("reduce_scatter",), collective(CollectiveKind.REDUCE_SCATTER)),
    Primitive(("all_to_all",), collective(CollectiveKind.ALL_TO_ALL)),
    Primitive(("ppermute",), collective(CollectiveKind.COLLECTIVE_PERMUTE)),
    Primitive(("device_put",), copy_between_memories, is_view=True),
    Primitive((CONVERSION,)),
    Primitive((EXPERTS,), experts),
    Primitive((EXPERTS_GRADIENT,), experts_gradient),
    Primitive((SPARSE_ATTENTION,), sparse_attention),
    Primitive((SPARSE_GRADIENT,), sparse_gradient),
    Primitive((BLOCK_ATTENTION,), block_attention),
    Primitive((BLOCK_GRADIENT,), block_gradient),
    Primitive(("pallas_call",), approximation="kernels, counted by their operands and results"),
    Primitive(
        ("while",), rule=None,
        approximation="loops whose length depends on data, counted as one trip",
    ),
    Primitive(("cond",), rule=None, approximation="choices between branches, counted as the last branch"),
)  # fmt: skip

PRIMITIVES = {name: row for row in ROWS for name in row.names}
"""Name of a primitive -> its row."""
WITHOUT_ROW = Primitive((), rule=None)
"""The row for primitives that have none."""


def find_primitive(name: str) -> Primitive:
    """Return the row of a primitive, or `WITHOUT_ROW`."""
    return PRIMITIVES.get(name, WITHOUT_ROW)


def name_results(naming: AxisNaming, name: str, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Apply the rule of the primitive `name` to an equation; without a rule, the equation counts as elementwise."""
    rule = find_primitive(name).rule
    if rule is None:
        naming.unpriced[name] += 1
        rule = elementwise
    return rule(naming, equation, arrays)


def has_result_of_operands_shape(name: str) -> bool:
    """Return whether a primitive's results have the logical axes of operands with the same shape."""
    return find_primitive(name).rule in (None, elementwise, source)


def moved_axes(equation: Any, arrays: list[TracedArray]) -> Iterator[tuple[str, TracedArray]]:
    """Yield each logical axis along which an equation moves elements, with the operand that has the axis.

    If such an axis is sharded, devices exchange elements. A slice of a single element, such as the last position, does
    not count.
    """
    primitive = find_primitive(equation.primitive.name)
    for array in arrays:
        dims: Iterable[int] = ()
        if primitive.ordered_dimensions is not None:
            along = equation.params[primitive.ordered_dimensions]
            dims = (along,) if isinstance(along, int) else along
        elif primitive.rule is resize and len(array.dims) == len(equation.outvars[0].aval.shape):
            sizes = zip(shape_of(array), equation.outvars[0].aval.shape, strict=True)
            dims = [i for i, (old, new) in enumerate(sizes) if old != new and 1 not in (old, new)]
        for i in dims:
            yield from ((name, array) for name, _ in array.dims[i] if isinstance(name, str))


def is_one(atom: Any) -> bool:
    """Return whether an operand of an equation is the scalar constant 1."""
    return isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)
