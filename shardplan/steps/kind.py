"""The interface of a kind of step: its arrays beside the model, and its computation.

A step is written once. `shardplan.program.step_trace` traces `compute` with the arrays of `inputs` and `state` to price
it, and `shardplan.execution.step_program` compiles and runs the same function with the same arrays, sharded as a plan
says. What differs between the two is in a `StepRun`: the order of positions, the number of shards of the vocabulary,
and how arrays get their stored sharding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from haliax import NamedArray

from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.steps.forward import Forward, cast_for_compute


@dataclass(frozen=True)
class StepRun:
    """The settings that a step needs besides its arrays."""

    model: Model
    workload: Workload
    forward: Forward
    """The forward pass of the model's layers."""
    vocab_shards: int = 1
    """Number of devices that share the vocabulary in computations."""
    store: Callable[[Any], Any] = lambda tree: tree
    """Constrains the arrays of a pytree to their stored sharding."""
    prepare: Callable[[Any], Any] = lambda module: module
    """Replaces parts of the module, before its layers run, by parts that compute the same."""

    def for_compute(self, module: Any) -> Any:
        """Return the module for the layers, with its weights in the compute type."""
        return cast_for_compute(self.prepare(module), self.workload.compute_dtype)


class StepKind(Protocol):
    """The interface of a kind of step: its state, its inputs, and what it computes."""

    name: str
    """The value of `workload.kind` that selects this step."""
    donates: bool
    """Whether the step donates the model and the state, so that its results may be in their memory."""

    def state(self, workload: Workload, parameters: Any) -> tuple[Any, ...]:
        """Return the abstract arrays that are stored beside the model, as a tuple of pytrees.

        Args:
            parameters: the parameters as a pytree with a `jax.ShapeDtypeStruct` for every array.
        """

    def inputs(self, model: Model, workload: Workload, is_packed: bool = False) -> tuple[NamedArray, ...]:
        """Return the abstract arrays that a step takes after the model and the state.

        Args:
            is_packed: whether several windows of different lengths are packed into a sequence.
        """

    def compute(self, run: StepRun, module: Any, *arguments: Any) -> Any:
        """Compute one step, as a function that JAX traces.

        Args:
            module: the model's weights, in their stored type.
            arguments: the arguments of `state`, then the arguments of `inputs`.
        """
