"""The step of a workload, traced with abstract arrays."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig

from shardplan.errors import ConfigError, nearest
from shardplan.experts.planned_model import make_module
from shardplan.hardware import divisors
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.model.dtypes.parameter_dtypes import with_dtypes
from shardplan.model.gradient_checkpointing.activation_names import with_activation_names
from shardplan.model.gradient_checkpointing.kept_selection import without_kept_selection
from shardplan.model.inspect import axes_of, named_leaves
from shardplan.model.logits.levanter_loss import one_block_of_tokens
from shardplan.model.registry import Model
from shardplan.plan.workload.checkpointing import DEFAULT, CheckpointPolicy
from shardplan.plan.workload.workload import Workload
from shardplan.program.attention.layer_attention import attention_calls
from shardplan.program.layer_flops import with_layer_flops
from shardplan.program.marked.marked_attention import mark_attention
from shardplan.program.marked.marked_blocks import mark_block_attention
from shardplan.program.marked.marked_conversions import mark_conversions
from shardplan.program.marked.marked_experts import mark_experts
from shardplan.program.marked.marked_sparse import mark_sparse_attention
from shardplan.program.named_arrays import is_parameter_like, traced_mesh_axis
from shardplan.program.operations import all_operations
from shardplan.program.tasks import Step, Task, TaskKind
from shardplan.program.trace import Argument, ArrayClass, Trace, trace_jaxpr
from shardplan.program.unrolled_blocks import trace_equal_blocks_once
from shardplan.program.variants.checkpointed import is_rewritable, with_policy
from shardplan.program.variants.first_weights import mark_first_weights
from shardplan.program.variants.gradient_kernels import mark_gradient_kernels
from shardplan.program.variants.kept_activations import KeptActivations, kept_activations
from shardplan.program.variants.resized import Resizer, TracedBatch, traced_batch
from shardplan.program.walk import build_step
from shardplan.steps.checkpointing import checkpoint_policy
from shardplan.steps.forward import SequenceForward
from shardplan.steps.kind import StepRun
from shardplan.steps.kinds import step_of


def trace_step(model: Model, workload: Workload, selects_again: bool = False) -> Trace:
    """Trace the step of `workload`: the `compute` of its kind, with the kind's state and inputs.

    Attention is traced as plain matmuls and softmax, marked with its kind; the plan decides which kernel runs it. A
    block of routed experts is traced as one operation, and so are Native Sparse Attention, attention to given blocks
    and the conversion of a weight that is kept as stored. Every logical axis is mapped to a mesh axis of its own, of
    size 1, so that sharding constraints carry the names of logical axes.

    Args:
        selects_again: whether the backward pass recomputes the selection of blocks, as `with_policy` requires.
    """
    template = _template(model, workload.checkpoint_policy, selects_again)
    _check_blocks(workload.checkpoint_policy.blocks, template)
    kind = step_of(workload)
    module = with_dtypes(template, workload.param_dtype)
    parameters = eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state, inputs = kind.state(workload, parameters), kind.inputs(model, workload)
    arrays, static = eqx.partition((module, *state, *inputs), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    names: set[str] = set()
    for _, leaf in named_leaves(arrays):
        names.update(axis.name for axis in axes_of(leaf))
    mapping = {name: traced_mesh_axis(name) for name in sorted(names)}
    run = StepRun(model, workload, SequenceForward(), prepare=trace_equal_blocks_once)

    def step(arrays: Any) -> Any:
        """Compute the step of the workload."""
        module, *others = eqx.combine(arrays, static)
        with hax.axis_mapping(mapping):
            return kind.compute(run, module, *others)

    mesh_axes = (*mapping.values(), *MESH_AXES)  # a model's `shard_map` may name the axes of a plan's mesh
    mesh = AbstractMesh((1,) * len(mesh_axes), mesh_axes, axis_types=(AxisType.Auto,) * len(mesh_axes))
    with (
        jax.sharding.use_abstract_mesh(mesh), _without_optimization(), one_block_of_tokens(),
        mark_attention(model.is_decoder), mark_experts(workload.expert_load_spread), mark_conversions(),
        mark_sparse_attention(), mark_block_attention(),
    ):  # fmt: skip
        jaxpr = jax.make_jaxpr(step)(arrays)
    _check_names(workload.checkpoint_policy.names, {*_activation_names(jaxpr.jaxpr)})
    classes = [ArrayClass.PARAMETER, *[ArrayClass.STATE] * len(state), *[ArrayClass.INPUT] * len(inputs)]
    arguments = []
    for array_class, part in zip(classes, arrays, strict=True):
        for path, leaf in named_leaves(part):
            array = leaf.array if isinstance(leaf, NamedArray) else leaf
            axes = tuple(axis.name for axis in axes_of(leaf)) or (None,) * array.ndim
            arguments.append(Argument(axes, path, array_class))
    return trace_jaxpr(jaxpr, arguments, kind.donates)


@lru_cache(maxsize=128)
def plan_step(model: Model, workload: Workload) -> Step:
    """Return the traced step of `workload`, with the parameters and the state that it keeps in memory.

    Training steps with other batches, and with most other policies of gradient checkpointing, are derived from one
    trace.
    """
    if not workload.is_training:
        return _finished_step(model, trace_step(model, workload))
    traced, resizer = _with_traced_batch(model, workload)
    return resizer.step(_training_step(model, traced))


@lru_cache(maxsize=128)
def plan_kept_activations(model: Model, workload: Workload, with_host: bool) -> KeptActivations | None:
    """Return the options to keep or offload the activations of a training step, relative to the default policy.

    Args:
        workload: workload of a training step with the default policy of gradient checkpointing.
        with_host: whether activations can be copied to the host.

    Returns:
        None if layers are not stacked, for which only whole policies can be compared.
    """
    traced, resizer = _with_traced_batch(model, workload)
    kept = _kept_activations(model, traced, with_host)
    return None if kept is None else resizer.kept(kept)


@lru_cache(maxsize=8)
def _kept_activations(model: Model, workload: Workload, with_host: bool) -> KeptActivations | None:
    trace = _training_trace(model, workload, selects_again=True)
    if not is_rewritable(trace, workload.checkpoint_policy):
        return None
    return kept_activations(trace, with_host, lambda tasks: _finished_tasks(trace, tasks))


@lru_cache(maxsize=32)
def _training_step(model: Model, workload: Workload) -> Step:
    """Return the training step under the policy of `workload`, derived from the default policy's step if possible."""
    policy = workload.checkpoint_policy
    trace = _training_trace(model, replace(workload, gradient_checkpointing=DEFAULT), selects_again=True)
    if not is_rewritable(trace, policy):
        return _finished_step(model, _training_trace(model, workload))
    _check_names(policy.names, {operation.activation for operation in all_operations(trace.operations)})
    return _finished_step(model, with_policy(trace, policy))


@lru_cache(maxsize=16)
def _training_trace(model: Model, workload: Workload, selects_again: bool = False) -> Trace:
    return trace_step(model, workload, selects_again)


def _with_traced_batch(model: Model, workload: Workload) -> tuple[Workload, Resizer]:
    """Return the workload with the batch for tracing, and a `Resizer` that changes results to the requested batch."""
    parts, sizes = workload.num_microbatches, {workload.position}
    for _, leaf in named_leaves(model.template):
        sizes.update(axis.size for axis in axes_of(leaf))
    traced, wanted = traced_batch(sizes, parts > 1), TracedBatch(workload.batch // parts, parts)
    batch = traced.sequences * traced.microbatches
    return replace(workload, batch=batch, microbatches=traced.microbatches), Resizer(traced, wanted)


def _finished_step(model: Model, trace: Trace) -> Step:
    """Return the step of a trace, with the parameters and the state that it keeps in memory."""
    step = build_step(trace)
    return replace(
        step,
        parameters=trace.arguments_of(ArrayClass.PARAMETER),
        state=trace.arguments_of(ArrayClass.STATE),
        tasks=_finished_tasks(trace, step.tasks),
        activation_axes=trace.input_axes,
        vocab=model.template.Vocab.name,
        attention_calls=tuple(attention_calls(trace.operations, trace.arrays)),
    )


def _finished_tasks(trace: Trace, tasks: Iterable[Task]) -> tuple[Task, ...]:
    marked: Iterable[Task] = (_mark_work_on_parameters(task, trace.input_axes) for task in tasks)
    if any(operation.is_backward for operation in all_operations(trace.operations)):
        marked = mark_first_weights(marked, trace.operations, trace.arrays)
    return with_layer_flops(mark_gradient_kernels(marked))


def forward_workload(workload: Workload) -> Workload:
    """Return the workload of only the forward pass.

    For training, it has one sequence, so that its trace serves every batch.
    """
    if not workload.is_training:
        return workload
    return replace(workload, kind="eval", batch=1, microbatches=1, gradient_checkpointing="default", optimizer="adamw")


def _check_blocks(blocks: int | None, template: Any) -> None:
    """Check that a nested policy's blocks divide the number of layers, as Haliax requires.

    Raises:
        ConfigError: a number of blocks does not divide the number of layers.
    """
    if blocks is None:
        return
    modules = jax.tree.leaves(template, is_leaf=lambda node: isinstance(node, hax.nn.Stacked))
    for layers in {module.Block.size for module in modules if isinstance(module, hax.nn.Stacked)}:
        if layers % blocks:
            raise ConfigError(
                f"workload.gradient_checkpointing is nested:{blocks}, and {layers} layers do not divide into {blocks} "
                f"blocks; use one of {', '.join(map(str, divisors(layers)))}"
            )


def _check_names(kept: Sequence[str], known: Collection[str]) -> None:
    """Check that activations of a traced program have the names that gradient checkpointing refers to.

    Raises:
        ConfigError: a name belongs to no activation.
    """
    for name in kept:
        if name not in known:
            raise ConfigError(
                f"workload.gradient_checkpointing keeps {name!r}, and no activation of the model has this name; "
                f"{nearest(name, sorted(filter(None, known)))}"
            )


def _activation_names(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the names of the activations of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            yield equation.params["name"]
        for called in jaxprs_in_params(equation.params):
            yield from _activation_names(called)


def _mark_work_on_parameters(task: Task, activation_axes: tuple[str, ...]) -> Task:
    """Mark `task` if it is not a matmul and works only on parameters, their copies and gradients."""
    arrays = (*task.operands, *task.results)
    kinds = (TaskKind.ELEMENTWISE, TaskKind.HOST_COPY)
    is_marked = task.kind in kinds and all(is_parameter_like(array, activation_axes) for array in arrays)
    return replace(task, is_on_parameters=True) if is_marked else task


@lru_cache(maxsize=32)
def _template(model: Model, checkpointing: CheckpointPolicy, selects_again: bool) -> Any:
    """Return the module tree of `model` for a kind of gradient checkpointing, in a form that is traced quickly."""
    settings: dict[str, Any] = {"gradient_checkpointing": checkpoint_policy(checkpointing)}
    if isinstance(getattr(model.config, "rope", None), Llama3RotaryEmbeddingsConfig):
        # other frequencies by the same operations; those of Llama 3 take 17 compiles, half a second, and nothing in a
        # trace depends on them
        settings["rope"] = DefaultRotaryEmbeddingsConfig()
    names = {each.name for each in fields(model.config)}
    config = replace(model.config, **{name: value for name, value in settings.items() if name in names})
    module = with_activation_names(make_module(model, config))
    return without_kept_selection(module) if selects_again else module


@contextmanager
def _without_optimization() -> Iterator[None]:
    """Compile constants of a trace, such as rotary frequencies, without optimization, because each runs only once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
