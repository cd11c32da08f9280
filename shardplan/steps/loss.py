"""The step of an evaluation: the loss of every token."""

from typing import Any

import jax.numpy as jnp
from haliax import NamedArray

from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.steps.inputs import abstract_tokens
from shardplan.steps.kind import StepRun


class LossStep:
    """Computes (module, tokens, predicted) -> the loss in nats of every next token, float32[batch, position].

    `tokens` is int32[batch, position], `predicted` bool[batch, position]; the loss is 0 where `predicted` is False. If
    windows are packed, there is a further input, `window_starts` (see `shardplan.steps.forward.compute_activations`),
    and the plan must not shard positions.
    """

    name = "eval"
    donates = False

    def state(self, workload: Workload, parameters: Any) -> tuple[Any, ...]:
        """Return nothing: a loss needs no state."""
        return ()

    def inputs(self, model: Model, workload: Workload, is_packed: bool = False) -> tuple[NamedArray, ...]:
        """Return `tokens` and `predicted`, and `window_starts` for packed windows."""
        tokens = abstract_tokens(model, workload)
        return (tokens, abstract_tokens(model, workload, jnp.bool_), *([tokens] if is_packed else []))

    def compute(
        self,
        run: StepRun,
        module: Any,
        tokens: NamedArray,
        predicted: NamedArray,
        window_starts: NamedArray | None = None,
    ) -> NamedArray:
        """Compute the losses, with their logits in the blocks of the workload."""
        return run.forward.losses(
            run.model, run.for_compute(module), tokens, predicted, window_starts, run.workload.num_logit_blocks
        )
