"""The model as it runs under a plan: which attention kernel, and what is kept for the gradient."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from levanter.layers.attention import AttentionBackend

from shardplan.attention.levanter import method_of, with_sequence_parallel
from shardplan.hardware import parse_slice
from shardplan.model import Model
from shardplan.plan.attention import has_kernel
from shardplan.plan.calibration import habits
from shardplan.plan.layout import Layout
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import UNCUT, Plan
from shardplan.plan.tracing import plan_step
from shardplan.plan.workload import workload_of
from shardplan.positions.layout import KERNEL_BLOCK

SPLASH = "splash"


def specialize(model: Model, plan: Plan) -> Model:
    """`model` with the attention and the gradient checkpointing of `plan`."""
    checkpointing: Any = plan.workload.gradient_checkpointing
    backend = attention_backend(model, plan)
    config = dataclasses.replace(
        model.config,
        attn_backend=AttentionBackend(backend),
        flash_attention_block_size=KERNEL_BLOCK if backend == SPLASH else None,
        gradient_checkpointing=True if checkpointing == "default" else checkpointing,
    )
    template = eqx.filter_eval_shape(config.model_type.init, model.vocab, config, key=jax.random.PRNGKey(0))
    if plan.attention.strategy != UNCUT:
        kernel = "splash" if backend == SPLASH else "blockwise"
        template = with_sequence_parallel(template, method_of(plan, kernel))
    return dataclasses.replace(model, config=config, template=template)


def attention_backend(model: Model, plan: Plan) -> str:
    """Levanter's name of the attention that a plan runs: "splash" (a Pallas kernel) or "jax_flash".

    See `shardplan.plan.attention.has_kernel`.
    """
    forward = dataclasses.replace(plan.workload, kind="eval")
    step = plan_step(model, workload_of(forward))
    compute = as_tuples(plan.compute_mapping)
    known = habits(parse_slice(plan.hardware.slice))
    layout = Layout(plan.mesh, compute, {}, step.merged, step.activation_axes, known, plan.attention)
    attention = [task for task in step.tasks if task.kind == "attention"]
    return SPLASH if attention and all(has_kernel(task, layout) for task in attention) else "jax_flash"
