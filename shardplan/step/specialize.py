"""The model as it runs under a plan: its attention kernel, sequence parallelism and gradient checkpointing."""

import dataclasses
from typing import Any

from levanter.layers.attention import AttentionBackend

from shardplan.attention.levanter import with_sequence_parallel
from shardplan.cost.attention import kernel_of
from shardplan.cost.calibration import compiler_quirks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.registry import Model, abstract_module
from shardplan.plan.attention_plan import KernelName, Strategy
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_layout import KERNEL_BLOCK
from shardplan.program.step_trace import plan_step


def specialize(model: Model, plan: Plan) -> Model:
    """Return `model` with the attention and the gradient checkpointing of `plan`.

    Raises:
        ConfigError: the plan was edited, and its kernel cannot compute attention with its mappings.
    """
    checkpointing: Any = plan.workload.gradient_checkpointing
    uses_splash = plan.attention.kernel == KernelName.SPLASH
    if uses_splash and _supported_kernel(model, plan) != KernelName.SPLASH:
        raise ConfigError(
            "plan: attention.kernel is splash, which cannot compute attention as compute_mapping and attention shard "
            "it; make it blockwise, or plan again"
        )
    config = dataclasses.replace(
        model.config,
        attn_backend=AttentionBackend.SPLASH if uses_splash else AttentionBackend.JAX_FLASH,
        flash_attention_block_size=KERNEL_BLOCK if uses_splash else None,
        gradient_checkpointing=True if checkpointing == "default" else checkpointing,
    )
    template = abstract_module(config, model.vocab)
    if plan.attention.strategy != Strategy.NONE:
        template = with_sequence_parallel(template, plan)
    return dataclasses.replace(model, config=config, template=template)


def _supported_kernel(model: Model, plan: Plan) -> KernelName:
    """The kernel that can compute attention on each device; the forward pass is enough to tell."""
    step = plan_step(model, dataclasses.replace(plan.workload, kind="eval", microbatches=1).resolve())
    assignment = ShardingAssignment(
        plan.mesh,
        as_tuples(plan.compute_mapping),
        {},
        step.merged_axes,
        step.activation_axes,
        compiler_quirks(parse_slice(plan.hardware.slice)),
        plan.attention,
        step.pattern,
    )
    return kernel_of(step.tasks, assignment)
