"""Routed experts of Levanter's Mixtral and Qwen3-MoE, computed by `shardplan.experts.block`; Levanter is not patched.

Levanter's own blocks gather the tokens of all devices, sort them by expert on every device, and leave it to the
compiler how the grouped matmuls are sharded. The blocks that replace them keep the parameters, their names and their
axes, the router with its dtypes, and the statistics and auxiliary losses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from haliax.partitioning import current_thread_local_mapping
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from levanter.models.mixtral import MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock

from shardplan.errors import ConfigError, check_argument
from shardplan.experts.block import routed_mlp
from shardplan.experts.expert_weights import ExpertFunction, ExpertWeights
from shardplan.experts.method import UNSHARDED, ExpertMethod

SCORES = "expert_score"
"""Name of the axis of experts in the router's results."""

Result = tuple[NamedArray, dict[str, NamedArray]]
"""The result of one of Levanter's blocks of experts: outputs, and the statistics and losses of its routing."""


@runtime_checkable
class HasExpertMethod(Protocol):
    """An object with a method for experts, such as a Plan."""

    @property
    def experts(self) -> ExpertMethod | None:
        """The method of experts; None for Levanter's own blocks."""


class Choice(NamedTuple):
    """The experts that a router chooses for each token."""

    weights: NamedArray
    """Scores of the chosen experts, {..., k}."""
    chosen: NamedArray
    """Indices of the chosen experts, int32{..., k}."""


@dataclass(frozen=True)
class LevanterActivation:
    """The hidden state of an expert: activation(gate) * up, with Levanter's activation."""

    function: Callable[[Array], Array]

    def __call__(self, gate: Array | None, up: Array) -> Array:
        """Compute the hidden states."""
        assert gate is not None
        return self.function(gate) * up


class ExpertParallelMixtral(MixtralSparseMoeBlock):
    """Levanter's block of Mixtral, with experts computed by `shardplan.experts.block.routed_mlp`."""

    method: ExpertMethod | None = eqx.field(static=True, default=None)
    """How experts are computed; None for the default."""

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray, *, key: Any = None) -> Result:
        """Compute the output {..., embed} from an input with the same axes, and Levanter's statistics and losses."""
        del key  # for noise in projections, which no model has
        return _mixtral_block(self, x, self.method)


class ExpertParallelQwen3Moe(Qwen3MoeSparseMoeBlock):
    """Levanter's block of Qwen3-MoE, with experts computed by `shardplan.experts.block.routed_mlp`."""

    method: ExpertMethod | None = eqx.field(static=True, default=None)
    """How experts are computed; None for the default."""

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray, *, key: Any = None) -> Result:
        """Compute the output {..., embed} from an input with the same axes, and Levanter's auxiliary loss."""
        del key  # for noise in projections, which no model has
        return _qwen3_moe_block(self, x, self.method)


PARALLEL_CLASSES: dict[Any, Any] = {
    MixtralSparseMoeBlock: ExpertParallelMixtral,
    Qwen3MoeSparseMoeBlock: ExpertParallelQwen3Moe,
}
"""Levanter's class of expert blocks -> shardplan's class that replaces it."""


LEVANTERS_CALLS: dict[Any, Any] = {original: original.__call__ for original in PARALLEL_CLASSES}
"""Levanter's class of expert blocks -> its forward method."""


def with_expert_parallel(module: Any, method: ExpertMethod | HasExpertMethod) -> Any:
    """Return a Levanter model, with or without weights, whose experts are computed by a method or by a plan's method.

    Parameters keep their names and axes, so that checkpoints are loaded and saved as before. The active axis mapping
    decides how experts and their hidden states are sharded. If the plan leaves experts to Levanter's own blocks, the
    model is unchanged.

    >>> import haliax as hax, jax
    >>> from levanter.models.mixtral import MixtralConfig, MixtralLMHeadModel
    >>> config = MixtralConfig(
    ...     max_seq_len=16, hidden_dim=16, intermediate_dim=32, num_layers=2, num_heads=2, num_kv_heads=2
    ... )
    >>> model = MixtralLMHeadModel.init(hax.Axis("vocab", 32), config, key=jax.random.PRNGKey(0))
    >>> model = with_expert_parallel(model, ExpertMethod("gather_tokens"))
    >>> type(model.transformer.layers.stacked.block_sparse_moe).__name__
    'ExpertParallelMixtral'

    Raises:
        ConfigError: the model has no block of Levanter's Mixtral or Qwen3-MoE, or a modified one.
    """
    check_argument(
        "with_expert_parallel", "method", method, (ExpertMethod, HasExpertMethod),
        "ExpertMethod('gather_tokens'), or a plan",
    )  # fmt: skip
    blocks = list(_blocks(module))
    if not blocks:
        raise ConfigError(
            f"{type(module).__name__} has no experts of Levanter's Mixtral or Qwen3-MoE; call with_expert_parallel for "
            "a model that has"
        )
    chosen = method if isinstance(method, ExpertMethod) else method.experts
    if chosen is None:
        return module
    for block in blocks:
        problem = _why_not_replaceable(block)
        if problem is not None:
            raise ConfigError(f"with_expert_parallel: {problem}")
    return replace_blocks(module, chosen)


def patch_blocks(method: ExpertMethod | None) -> None:
    """Make Levanter's own blocks compute experts as shardplan's blocks do, where possible.

    Args:
        method: None for the default.
    """
    for original, compute in ((MixtralSparseMoeBlock, _mixtral_block), (Qwen3MoeSparseMoeBlock, _qwen3_moe_block)):
        original.__call__ = _patched_call(LEVANTERS_CALLS[original], compute, method)


def _patched_call(own: Any, compute: Any, method: ExpertMethod | None) -> Any:
    """Return a forward method that calls `compute`, or `own` for a block that `compute` does not support."""

    def call(block: Any, x: NamedArray, *, key: Any = None) -> Result:
        """Compute a block of experts."""
        if _why_not_replaceable(block) is None:
            result: Result = compute(block, x, method)
            return result
        other: Result = own(block, x, key=key)
        return other

    return named_call(call, name=own.__qualname__.partition(".")[0])


def replace_blocks(module: Any, method: ExpertMethod | None) -> Any:
    """Replace all blocks of experts of a model by blocks that use `method`; None is the default method.

    >>> from levanter.models.mixtral import MixtralConfig
    >>> block = eqx.filter_eval_shape(MixtralSparseMoeBlock.init, MixtralConfig(), key=jax.random.PRNGKey(0))
    >>> type(replace_blocks(block, None)).__name__
    'ExpertParallelMixtral'
    """

    def change(node: Any) -> Any:
        if not _is_block(node):
            return node
        if _has_method(node):
            return replace(node, method=method)
        values = {field.name: getattr(node, field.name) for field in fields(node)}
        return PARALLEL_CLASSES[type(node)](**values, method=method)

    return jax.tree.map(change, module, is_leaf=_is_block)


def restore_blocks(module: Any) -> Any:
    """Replace shardplan's blocks of experts in a model by Levanter's own.

    >>> from levanter.models.mixtral import MixtralConfig
    >>> block = eqx.filter_eval_shape(MixtralSparseMoeBlock.init, MixtralConfig(), key=jax.random.PRNGKey(0))
    >>> type(restore_blocks(replace_blocks(block, None))).__name__
    'MixtralSparseMoeBlock'
    """

    def change(node: Any) -> Any:
        if not _has_method(node):
            return node
        values = {field.name: getattr(node, field.name) for field in fields(node) if field.name != "method"}
        original = next(own for own, parallel in PARALLEL_CLASSES.items() if type(node) is parallel)
        return original(**values)

    return jax.tree.map(change, module, is_leaf=_is_block)


def has_replaceable_experts(module: Any) -> bool:
    """Return whether a model has Levanter's blocks of experts, and all of them are replaceable.

    >>> from levanter.models.mixtral import MixtralConfig
    >>> config = MixtralConfig(use_bias=True)
    >>> block = eqx.filter_eval_shape(MixtralSparseMoeBlock.init, config, key=jax.random.PRNGKey(0))
    >>> has_replaceable_experts(block)
    False
    """
    blocks = list(_blocks(module))
    return bool(blocks) and all(_why_not_replaceable(block) is None for block in blocks)


def has_parallel_experts(module: Any) -> bool:
    """Return whether shardplan's blocks have replaced blocks of experts in a model.

    >>> from levanter.models.mixtral import MixtralConfig
    >>> block = eqx.filter_eval_shape(MixtralSparseMoeBlock.init, MixtralConfig(), key=jax.random.PRNGKey(0))
    >>> has_parallel_experts(block), has_parallel_experts(replace_blocks(block, None))
    (False, True)
    """
    return any(map(_has_method, _blocks(module)))


def _has_method(block: Any) -> bool:
    """Return whether a block of experts is one of shardplan's blocks."""
    return isinstance(block, tuple(PARALLEL_CLASSES.values()))


def _why_not_replaceable(block: Any) -> str | None:
    """Return the reason why one of Levanter's blocks of experts cannot be replaced, with a remedy; else None."""
    if type(block) not in PARALLEL_CLASSES and not _has_method(block):
        return (
            f"{type(block).__name__} is a subclass of Levanter's block of experts and may do more; use Levanter's "
            "class, or leave the model as it is"
        )
    if block.config.dense_router_gradient:
        return (
            "dense_router_gradient is True: every device would compute all experts for all its tokens; set it to "
            "False, or leave the model as it is"
        )
    if any(projection.bias is not None for projection in _projections(block)):
        return "experts have biases (use_bias is True), which Levanter shares among all experts; set use_bias to False"
    return None


def _mixtral_block(block: MixtralSparseMoeBlock, x: NamedArray, method: ExpertMethod | None) -> Result:
    """Compute a block of Levanter's Mixtral, whose router computes in the dtype of the tokens."""
    config = block.config
    logits, tokens = _router_logits(block, x), _token_axes(block, x)
    probabilities = hax.nn.softmax(logits, SCORES)
    weights, chosen = _choose(probabilities, config.TopExperts)
    weights = weights / hax.sum(weights, config.TopExperts)
    outputs = _apply_experts(block, x, chosen, weights, method)
    counts = _count_rows(chosen, config.Experts)
    loads = counts / hax.sum(counts, config.Experts)
    extras = {"expert_loads": loads}
    if config.lbl_coef is not None:
        fractions = loads * config.n_routed_experts / config.num_experts_per_tok
        mean = hax.mean(probabilities, tokens).rename({SCORES: config.Experts.name})
        extras["load_balancing_loss"] = config.lbl_coef * hax.sum(fractions * mean, config.Experts)
    if config.rzl_coef is not None:
        extras["router_z_loss"] = config.rzl_coef * hax.mean(hax.nn.logsumexp(logits, SCORES) ** 2, tokens)
    return outputs, extras


def _qwen3_moe_block(block: Qwen3MoeSparseMoeBlock, x: NamedArray, method: ExpertMethod | None) -> Result:
    """Compute a block of Levanter's Qwen3-MoE, whose router computes scores in float32."""
    config = block.config
    logits, tokens = _router_logits(block, x).astype(jnp.float32), _token_axes(block, x)
    probabilities = hax.nn.softmax(logits, SCORES)
    weights, chosen = _choose(probabilities, config.TopExperts)
    if config.norm_topk_prob:
        weights = weights / hax.sum(weights, config.TopExperts)
    outputs = _apply_experts(block, x, chosen, weights.astype(x.dtype), method)
    extras = {}
    if config.router_aux_loss_coef is not None:
        fractions = _count_rows(chosen, config.Experts).astype(jnp.float32) / hax.axis_size(tokens)
        mean = hax.mean(probabilities, tokens).rename({SCORES: config.Experts.name})
        loss = config.num_experts * hax.sum(fractions * mean, config.Experts)
        extras["load_balancing_loss"] = config.router_aux_loss_coef * loss
    return outputs, extras


def _is_block(node: Any) -> bool:
    return isinstance(node, tuple(PARALLEL_CLASSES))


def _blocks(module: Any) -> Iterator[Any]:
    """Yield Levanter's blocks of experts in a model."""
    yield from filter(_is_block, jax.tree.leaves(module, is_leaf=_is_block))


def _projections(block: Any) -> tuple[Any, Any, Any]:
    """Return the projections of a block's experts: gate, up and down."""
    experts = block.experts
    if isinstance(block, MixtralSparseMoeBlock):
        return experts.w1, experts.w3, experts.w2
    return experts.gate_proj, experts.up_proj, experts.down_proj


def _token_axes(block: Any, x: NamedArray) -> tuple[Axis, ...]:
    embed: str = block.config.Embed.name
    return tuple(axis for axis in x.axes if axis.name != embed)


def _router_logits(block: Any, x: NamedArray) -> NamedArray:
    """Return the products of the router and the tokens, {..., expert_score}, unsharded along experts.

    Tokens may be sharded over the mesh axes of the experts.
    """
    experts = block.config.Experts.name
    with _unmapped(experts):
        gate = jax.tree.map(
            lambda leaf: _mark_unsharded(leaf, experts) if isinstance(leaf, NamedArray) else leaf,
            hax.auto_sharded(block.gate),
            is_leaf=lambda leaf: isinstance(leaf, NamedArray),
        )
        logits: NamedArray = gate(x)
        return logits.rename({experts: SCORES}).rearrange((..., SCORES))


@contextmanager
def _unmapped(axis: str) -> Iterator[None]:
    """Remove a logical axis from the current axis mapping, if it is there."""
    mapping = current_thread_local_mapping()
    if mapping is None:
        yield
        return
    with hax.axis_mapping({name: axes for name, axes in mapping.items() if name != axis}):
        yield


def _mark_unsharded(array: NamedArray, axis: str) -> NamedArray:
    """Mark a logical axis of an array as one that no mapping shards, for traces."""
    if axis not in {each.name for each in array.axes}:
        return array
    return NamedArray(checkpoint_name(array.array, UNSHARDED + axis), array.axes)


def _choose(probabilities: NamedArray, TopExperts: Axis) -> Choice:
    """Choose for each token the experts with the best scores.

    Args:
        probabilities: {..., expert_score}, the scores.
    """
    axes = (*probabilities.axes[:-1], TopExperts)
    weights, chosen = jax.lax.top_k(probabilities.array, TopExperts.size)
    return Choice(hax.named(weights, axes), hax.named(chosen, axes))


def _count_rows(chosen: NamedArray, Experts: Axis) -> NamedArray:
    """Return how many tokens chose each expert, int32{experts}."""
    is_chosen = jax.nn.one_hot(chosen.array, Experts.size, dtype=jnp.int32)
    return hax.named(is_chosen.sum(tuple(range(chosen.ndim))), (Experts,))


def _apply_experts(
    block: Any, x: NamedArray, chosen: NamedArray, weights: NamedArray, method: ExpertMethod | None
) -> NamedArray:
    """Return the weighted sums of the outputs of each token's experts, with the axes of `x`."""
    gate, up, down = _projections(block)
    return routed_mlp(
        gate.Experts, gate.Out, gate.In, x, chosen, weights, ExpertWeights(gate.weight, up.weight, down.weight),
        ExpertFunction(LevanterActivation(block.experts.act)), method,
    )  # fmt: skip
