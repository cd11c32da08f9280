"""The step of training: gradients of Levanter's own loss, and one update of the parameters."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray

from shardplan.model.logits.levanter_loss import next_token_losses
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.steps.inputs import abstract_tokens
from shardplan.steps.kind import StepRun
from shardplan.steps.optimizer import abstract_optimizer_state, make_optimizer


class TrainStep:
    """Computes (module, state, tokens, predicted) -> (module, state, mean loss in nats).

    Module and optimizer state are updated in place. Parameters, gradients and optimizer state are stored in the stored
    sharding and type; the loss is Levanter's own, in the compute type. The model's `gradient_checkpointing` decides
    which activations are kept for the gradient. With several microbatches the tokens are
    int32[microbatch, batch, position].
    """

    name = "train"
    donates = True

    def state(self, workload: Workload, parameters: Any) -> tuple[Any, ...]:
        """Return the state of the optimizer."""
        return (abstract_optimizer_state(make_optimizer(workload.optimizer), parameters),)

    def inputs(self, model: Model, workload: Workload, is_packed: bool = False) -> tuple[NamedArray, ...]:
        """Return `tokens` and `predicted`."""
        return abstract_tokens(model, workload), abstract_tokens(model, workload, jnp.bool_)

    def compute(
        self, run: StepRun, module: Any, state: Any, tokens: NamedArray, predicted: NamedArray
    ) -> tuple[Any, Any, jax.Array]:
        """Compute one update of the module and the optimizer's state, and the mean loss."""
        loss, gradients = _loss_and_gradients(run, module, tokens, predicted)
        arrays = eqx.filter(module, eqx.is_inexact_array)
        updates, state = make_optimizer(run.workload.optimizer).update(gradients, state, arrays)
        return run.store(eqx.apply_updates(module, updates)), run.store(state), loss


def _loss_and_gradients(run: StepRun, module: Any, tokens: NamedArray, predicted: NamedArray) -> tuple[jax.Array, Any]:
    """Compute the mean loss of the `predicted` tokens, in nats, and its gradients.

    The loss is Levanter's own, including the auxiliary loss of routers, as in Levanter's trainer.

    Args:
        tokens: int32[batch, position]; or int32[microbatch, batch, position], whose microbatches are computed one
            after the other and whose losses and gradients are summed.
        predicted: bool, with the axes of `tokens`; where it is False the token does not count.
    """
    count = predicted.sum().array  # of all microbatches, so that their losses and gradients only have to be added up

    def loss_of(module: Any, tokens: NamedArray, predicted: NamedArray) -> jax.Array:
        losses = next_token_losses(run.for_compute(module), tokens, predicted, run.model.mask, run.model.logit_soft_cap)
        # an auxiliary loss stands at every position
        return (losses * predicted).sum().array / count

    differentiate = eqx.filter_value_and_grad(loss_of)
    if tokens.ndim == 2:
        loss, gradients = differentiate(module, tokens, predicted)
        return loss, run.store(gradients)

    def add(sums: tuple[jax.Array, Any], part: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
        loss, gradients = differentiate(module, *(NamedArray(array, tokens.axes[1:]) for array in part))
        # the sums of gradients are stored sharded between microbatches, as the parameters are
        added = jax.tree.map(jnp.add, sums, (loss, run.store(gradients)))
        return (added[0], run.store(added[1])), None

    zeros = run.store(jax.tree.map(jnp.zeros_like, eqx.filter(module, eqx.is_inexact_array)))
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), (tokens.array, predicted.array))[0]
