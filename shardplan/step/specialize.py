"""The model as it runs under a plan: which attention kernel, and what is kept for the gradient."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from levanter.layers.attention import AttentionBackend

from shardplan.attention.levanter import with_sequence_parallel
from shardplan.cost.attention import kernel_of
from shardplan.cost.calibration import quirks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model import Model
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import SPLASH, UNCUT, Plan
from shardplan.plan.workload import workload_of
from shardplan.positions.sequence_layout import KERNEL_BLOCK
from shardplan.program.step_trace import plan_step


def specialize(model: Model, plan: Plan) -> Model:
    """`model` with the attention and the gradient checkpointing of `plan`.

    Raises:
        ConfigError: somebody has edited the plan, so that its kernel would be wrong, or fail.
    """
    checkpointing: Any = plan.workload.gradient_checkpointing
    has_splash = plan.attention.kernel == SPLASH
    if has_splash and _kernel(model, plan) != SPLASH:
        raise ConfigError(
            "plan: attention.kernel is splash, which cannot do attention as compute_mapping and attention cut it; "
            "make it blockwise, or plan again"
        )
    config = dataclasses.replace(
        model.config,
        attn_backend=AttentionBackend.SPLASH if has_splash else AttentionBackend.JAX_FLASH,
        flash_attention_block_size=KERNEL_BLOCK if has_splash else None,
        gradient_checkpointing=True if checkpointing == "default" else checkpointing,
    )
    template = eqx.filter_eval_shape(config.model_type.init, model.vocab, config, key=jax.random.PRNGKey(0))
    if plan.attention.strategy != UNCUT:
        template = with_sequence_parallel(template, plan)
    return dataclasses.replace(model, config=config, template=template)


def _kernel(model: Model, plan: Plan) -> str:
    """What can do attention on each device; forward is enough to know."""
    step = plan_step(model, workload_of(dataclasses.replace(plan.workload, kind="eval", microbatches=1)))
    compute, known = as_tuples(plan.compute_mapping), quirks(parse_slice(plan.hardware.slice))
    layout = ShardingAssignment(
        plan.mesh, compute, {}, step.merged, step.activation_axes, known, plan.attention, step.pattern
    )
    return kernel_of(step.tasks, layout)
