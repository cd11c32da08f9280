"""The step of a prefill: the logits of the token after each prompt."""

from typing import Any

from haliax import NamedArray

from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.steps.forward import compute_logits
from shardplan.steps.inputs import abstract_tokens
from shardplan.steps.kind import StepRun


class PrefillStep:
    """Computes (module, tokens int32[batch, position]) -> logits float32[batch, vocab] of the token after each prompt.

    It keeps no keys and values, because it runs Levanter's training path, which has no cache.
    """

    name = "prefill"
    donates = False

    def state(self, workload: Workload, parameters: Any) -> tuple[Any, ...]:
        """Return nothing: a prefill keeps no cache."""
        return ()

    def inputs(self, model: Model, workload: Workload, is_packed: bool = False) -> tuple[NamedArray, ...]:
        """Return `tokens`, the only input."""
        return (abstract_tokens(model, workload),)

    def compute(self, run: StepRun, module: Any, tokens: NamedArray) -> NamedArray:
        """Compute the logits of the token after each prompt."""
        module = run.for_compute(module)
        return compute_logits(run.model, module, run.forward.last_activations(run.model, module, tokens))
