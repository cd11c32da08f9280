"""Prepares a model for a plan: its attention kernel, its blocks of experts and its gradient checkpointing."""

import dataclasses
from typing import Any

from levanter.layers.attention import AttentionBackend

from shardplan.attention.levanter import with_sequence_parallel
from shardplan.cost.attention import with_kernels
from shardplan.cost.calibration import compiler_quirks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.decoder.layers.sparse_layers import selected_method, with_selected_method
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.kernels.refusal import check_kernel
from shardplan.decoder.parts.attention.sparse.sparse_call import SUBJECT
from shardplan.decoder.parts.segments import Segment
from shardplan.errors import ConfigError
from shardplan.experts.levanter import has_replaceable_experts, with_expert_parallel
from shardplan.hardware import parse_slice
from shardplan.model.corrections.levanter_compat import LIBTPU_RELEASE
from shardplan.model.registry import Model, abstract_module
from shardplan.plan.attention_plan import KernelName, SparseKernel
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import Plan
from shardplan.plan.workload.checkpointing import CheckpointPolicy
from shardplan.positions.sequence_layout import KERNEL_BLOCK
from shardplan.program.step_trace import plan_step
from shardplan.steps.checkpointing import checkpoint_policy

SELECTED_METHODS = {
    SparseKernel.DENSE_MASK: SelectedMethod.DENSE_MASK,
    SparseKernel.GATHERED_BLOCKS: SelectedMethod.GATHERED_BLOCKS,
    SparseKernel.KERNEL: SelectedMethod.KERNEL,
}
"""Kernel of a plan for Native Sparse Attention -> the method that computes the selected branch."""
RETIRED_OPTION = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
"""A compiler option in plans made with libtpu 0.0.42, which later releases refuse on most generations."""


def specialize(model: Model, plan: Plan) -> Model:
    """Return `model` with the attention, the blocks of experts and the gradient checkpointing of `plan`.

    Raises:
        ConfigError: the plan was edited, and its kernel cannot compute attention under its mappings; the plan has an
            option of another compiler; or the model has no setting for gradient checkpointing.
    """
    checkpointing = plan.workload.checkpoint_policy
    uses_splash = plan.attention.kernel == KernelName.SPLASH
    if any(method.kernel == KernelName.SPLASH for method in plan.attention.methods):
        _check_kernels(model, plan)
    settings: dict[str, Any] = {
        "attn_backend": AttentionBackend.SPLASH if uses_splash else AttentionBackend.JAX_FLASH,
        "flash_attention_block_size": KERNEL_BLOCK if uses_splash else None,
        "gradient_checkpointing": checkpoint_policy(checkpointing),
    }
    if RETIRED_OPTION in plan.compiler_options:
        raise ConfigError(
            f"plan: the compiler option {RETIRED_OPTION}, of plans that were made with libtpu 0.0.42, is not one of "
            f"libtpu {LIBTPU_RELEASE}; plan again"
        )
    if model.is_decoder and selected_method(model.config.segments) is not None:
        settings["segments"] = _with_sparse_method(model, plan)
    names = {item.name for item in dataclasses.fields(model.config)}
    if checkpointing != CheckpointPolicy() and "gradient_checkpointing" not in names:
        raise ConfigError(
            f"workload.gradient_checkpointing is {checkpointing}, and {type(model.config).__name__} has no field "
            "gradient_checkpointing; add it, or leave it at default"
        )
    # a configuration class of the user's own need not have them
    config = dataclasses.replace(model.config, **{name: value for name, value in settings.items() if name in names})
    template = abstract_module(config, model.vocab)
    if plan.attention.is_sequence_parallel and model.uses_levanter_attention:
        template = with_sequence_parallel(template, plan)
    if has_replaceable_experts(template):
        template = with_expert_parallel(template, plan)
    return dataclasses.replace(model, config=config, template=template)


def _with_sparse_method(model: Model, plan: Plan) -> tuple[Segment, ...]:
    """Return the segments of a decoder with the plan's method for Native Sparse Attention.

    Raises:
        ConfigError: the plan was edited, so that layers with this attention have several methods, or a kernel that
            cannot compute them.
    """
    kinds = plan_step(model, dataclasses.replace(plan.workload, kind="eval", microbatches=1).resolve()).attention_kinds
    methods = {plan.attention.of(kind.name).sparse_kernel for kind in kinds if kind.sparse is not None}
    if len(methods) > 1:
        raise ConfigError(
            f"plan: attention.kernel of native sparse attention is {' and '.join(sorted(methods))}; make them one"
        )
    (method,) = methods
    if method is SparseKernel.KERNEL:
        for kind in kinds:
            if kind.sparse is not None:
                check_kernel(SUBJECT, "selection_block", kind.sparse.selection_block)
    return with_selected_method(model.config.segments, SELECTED_METHODS[method], plan.attention.layout)


def _check_kernels(model: Model, plan: Plan) -> None:
    """Check that the kernel of each kind of attention can compute the attention's shape on each device.

    Raises:
        ConfigError: a kernel of the plan cannot compute its attention.
    """
    # the forward pass has every kind of attention
    step = plan_step(model, dataclasses.replace(plan.workload, kind="eval", microbatches=1).resolve())
    assignment = ShardingAssignment(
        plan.mesh,
        as_tuples(plan.compute_mapping),
        {},
        step.merged_axes,
        step.activation_axes,
        compiler_quirks(parse_slice(plan.hardware.slice)),
        plan.attention,
    )
    supported = with_kernels(step, assignment)
    for kind in step.attention_kinds:
        kernel = plan.attention.of(kind.name).kernel
        if kernel == KernelName.SPLASH and supported.of(kind.name).kernel != kernel:
            of_kind = f" of {kind.name}" if len(step.attention_kinds) > 1 else ""
            raise ConfigError(
                f"plan: attention.kernel{of_kind} is splash, which cannot compute attention as compute_mapping and "
                "attention shard it; make it blockwise, or plan again"
            )
