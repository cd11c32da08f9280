"""The step of each kind of workload as a `Program`: the Levanter model with a plan's mappings."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh

from shardplan.model.forward import cast_for_compute, equal_windows, loss_and_gradients
from shardplan.model.inspect import axes_of
from shardplan.model.levanter_loss import block_sizes_of
from shardplan.model.registry import Model
from shardplan.model.token_scores import ScoreSettings, TokenScores
from shardplan.plan.mapping import as_tuples, mesh_size
from shardplan.plan.plan import Plan
from shardplan.program.optimizer import abstract_optimizer_state, make_optimizer
from shardplan.program.step_trace import token_axes
from shardplan.step.aot_program import Program, abstract_model, abstract_tokens
from shardplan.step.layout_forward import (
    compute_logits_in_layout,
    compute_losses_in_layout,
    compute_next_logits_in_layout,
    compute_scores_in_layout,
    planned_layout,
)


def step_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """Return the program of the plan's workload."""
    programs = {"eval": loss_program, "score": score_program, "train": train_program, "prefill": prefill_program}
    return programs[plan.workload.kind](model, plan, mesh)


def loss_program(model: Model, plan: Plan, mesh: Mesh, is_packed: bool = False) -> Program:
    """Return the evaluation step: (module, tokens, predicted) -> losses in nats of every next token.

    `tokens` is int32[batch, position], `predicted` bool[batch, position]; the losses are float32[batch, position], 0
    where not `predicted`.

    Args:
        is_packed: whether several windows are packed into a sequence: the step has the further argument
            `window_starts`, int32[batch, position], as `shardplan.model.forward.compute_activations`. The plan must not
            shard positions then.
    """

    def evaluate(
        module: Any, tokens: NamedArray, predicted: NamedArray, window_starts: NamedArray | None = None
    ) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            module = cast_for_compute(module, plan.workload.compute_dtype)
            return compute_losses_in_layout(
                model, module, tokens, predicted, window_starts, planned_layout(plan), plan.workload.num_logit_blocks
            )

    tokens, predicted = _abstract_batch(model, plan, mesh)
    arguments = (_abstract_module(model, plan, mesh), tokens, predicted, *([tokens] if is_packed else []))
    return Program("evaluate", evaluate, arguments, mesh)


def score_program(model: Model, plan: Plan, mesh: Mesh, is_packed: bool = False) -> Program:
    """Return the scoring step: (module, tokens int32[batch, position]) -> `TokenScores`.

    Its arrays have the axes and the sharding of the tokens. The score at the end of a window or sequence is that of
    another one's token.

    Args:
        is_packed: as for `loss_program`, for windows of several lengths; those of the workload's `window` need no
            further argument.
    """
    workload = plan.workload
    vocab_shards = mesh_size(plan.mesh, plan.compute_mapping.get(model.vocab.name, ()))
    settings = ScoreSettings(workload.top_k, workload.num_logit_blocks, vocab_shards, workload.temperature)

    def score(module: Any, tokens: NamedArray, window_starts: NamedArray | None = None) -> TokenScores:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            module = cast_for_compute(module, workload.compute_dtype)
            if window_starts is None:
                window_starts = equal_windows(tokens.axes[-1], workload.window)
            scores = compute_scores_in_layout(model, module, tokens, window_starts, settings, planned_layout(plan))
            return TokenScores(*map(hax.auto_sharded, scores))

    tokens, _ = _abstract_batch(model, plan, mesh)
    arguments = (_abstract_module(model, plan, mesh), tokens, *([tokens] if is_packed else []))
    return Program("score", score, arguments, mesh)


def logits_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """Return the program (module, tokens) -> logits float32[batch, position, vocab]."""

    def all_logits(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            module = cast_for_compute(module, plan.workload.compute_dtype)
            return compute_logits_in_layout(model, module, tokens, planned_layout(plan))

    tokens, _ = _abstract_batch(model, plan, mesh)
    return Program("logits", all_logits, (_abstract_module(model, plan, mesh), tokens), mesh)


def prefill_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """Return the prefill step: (module, tokens) -> logits float32[batch, vocab] of the token after each prompt.

    It keeps no keys and values, because it runs Levanter's training path, which has no cache.
    """

    def prefill(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            module = cast_for_compute(module, plan.workload.compute_dtype)
            return compute_next_logits_in_layout(model, module, tokens, planned_layout(plan))

    tokens, _ = _abstract_batch(model, plan, mesh)
    return Program("prefill", prefill, (_abstract_module(model, plan, mesh), tokens), mesh)


def train_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """Return the train step: (module, state, tokens, predicted) -> (module, state, mean loss in nats).

    Module and optimizer state are updated in place. Parameters, gradients and optimizer state are stored in the
    parameter sharding and dtype; the loss is Levanter's own, with the blocks that it has on the devices of the mesh, in
    the compute dtype. The model's `gradient_checkpointing`
    decides which activations are kept for the gradient. With several microbatches the tokens are
    int32[microbatch, batch, position].
    """
    transformation, dtype = make_optimizer(plan.workload.optimizer), plan.workload.compute_dtype
    device_kind = mesh.devices.flat[0].device_kind

    def train(module: Any, state: Any, tokens: NamedArray, predicted: NamedArray) -> tuple[Any, Any, jax.Array]:
        """Compute one update of the module and the optimizer's state, and the mean loss."""
        with hax.axis_mapping(as_tuples(plan.compute_mapping)), block_sizes_of(device_kind):
            loss, gradients = loss_and_gradients(
                model, module, tokens, predicted, dtype, lambda tree: _shard_as_stored(tree, plan)
            )
        arrays = eqx.filter(module, eqx.is_inexact_array)
        updates, state = transformation.update(gradients, state, arrays)
        return _shard_as_stored(eqx.apply_updates(module, updates), plan), _shard_as_stored(state, plan), loss

    module = _abstract_module(model, plan, mesh)
    parameters = eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    # eval_shape drops shardings; the state has the axes of its parameters, so that the same mapping gives them
    state = abstract_model(
        abstract_optimizer_state(transformation, parameters), mesh, as_tuples(plan.param_mapping), None
    )
    return Program("train", train, (module, state, *_abstract_batch(model, plan, mesh)), mesh, donated=(0, 1))


def _shard_as_stored(tree: Any, plan: Plan) -> Any:
    """Constrain every array to the parameter sharding."""
    mapping = as_tuples(plan.param_mapping)
    return jax.tree.map(
        lambda leaf: hax.shard(leaf, mapping) if axes_of(leaf) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, NamedArray),
    )


def _abstract_module(model: Model, plan: Plan, mesh: Mesh) -> Any:
    return abstract_model(model.template, mesh, as_tuples(plan.param_mapping), plan.workload.param_dtype)


def _abstract_batch(model: Model, plan: Plan, mesh: Mesh) -> tuple[NamedArray, NamedArray]:
    axes = token_axes(model, plan.workload.resolve())
    compute = as_tuples(plan.compute_mapping)
    return abstract_tokens(axes, jnp.int32, mesh, compute), abstract_tokens(axes, jnp.bool_, mesh, compute)
