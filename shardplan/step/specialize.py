"""The model as it runs under a plan: which attention kernel, and what is kept for the gradient."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from levanter.layers.attention import AttentionBackend

from shardplan.hardware import parse_slice
from shardplan.model import Model, inspect_model
from shardplan.plan.plan import Plan

SPLASH = "splash"
KERNEL_LANES = 128
"""Levanter's splash attention takes positions and head sizes that are multiples of this."""
KERNEL_BLOCK = 512
"""Side of the kernel's blocks, tokens. Some of Levanter's models ask for more than the memory of a v4 core can hold."""


def specialize(model: Model, plan: Plan) -> Model:
    """`model` with the attention backend and the gradient checkpointing of `plan` in its configuration."""
    checkpointing: Any = plan.workload.gradient_checkpointing
    backend = attention_backend(model, plan)
    config = dataclasses.replace(
        model.config,
        attn_backend=AttentionBackend(backend),
        flash_attention_block_size=KERNEL_BLOCK if backend == SPLASH else None,
        gradient_checkpointing=True if checkpointing == "default" else checkpointing,
    )
    template = eqx.filter_eval_shape(config.model_type.init, model.vocab, config, key=jax.random.PRNGKey(0))
    return dataclasses.replace(model, config=config, template=template)


def attention_backend(model: Model, plan: Plan) -> str:
    """Levanter's name of the attention that a plan runs: "splash" (a Pallas kernel) or "jax_flash".

    The kernel runs on each device alone (shard_map), so it is right only where a device has all positions, whole heads
    and, with every query head, its key head: a cut of q_heads_per_group alone would pair them wrongly, in silence.
    """
    attention = inspect_model(model).attention
    cut = plan.compute_mapping
    separable = all(
        not any(cut.get(axis) for axis in (*a.heads[1:], a.head_size)) and _size(plan, a.head_size) % KERNEL_LANES == 0
        for a in attention
    )
    on_tpu = not parse_slice(plan.hardware.slice).is_cpu
    position = plan.workload.position
    whole = (
        not cut.get(model.template.Pos.name) and position % KERNEL_LANES == position % min(KERNEL_BLOCK, position) == 0
    )
    return SPLASH if on_tpu and whole and separable and attention else "jax_flash"


def _size(plan: Plan, axis: str) -> int:
    return plan.model.axes[axis]
