"""The task that measures the loss of texts."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from jax.sharding import Mesh

from shardplan.config.sections import TaskConfig
from shardplan.errors import ConfigError
from shardplan.eval.loss.measures import summarize
from shardplan.eval.loss.windows import SCHEMA, LossWindows, divide_texts
from shardplan.eval.texts.reader import SpecialTokens
from shardplan.eval.texts.store import TextStore
from shardplan.execution import step_program
from shardplan.execution.aot_program import Program
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import SparseKernel
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload

logger = logging.getLogger(__name__)

SHARD_WINDOWS = 256
"""Default number of windows in a shard."""


@dataclass(frozen=True)
class LossTask:
    """Measures the loss of every token of the texts."""

    config: TaskConfig
    schema = SCHEMA
    outputs = ("loss",)
    counts_tokens = True

    @property
    def shard_windows(self) -> int:
        """Number of windows per shard; a shard has at least one step, even if a step has more windows."""
        return self.config.shard or SHARD_WINDOWS

    def stride(self, position: int) -> int:
        """Return the distance between the starts of two windows of `position` tokens."""
        return self.config.stride or position - 1

    def determinants(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that determine the results, besides texts, tokenizer, weights and types."""
        return {
            "task": "loss",
            "workload.position": plan.workload.position,
            "task.stride": self.stride(plan.workload.position),
            "task.special_tokens": self.config.special_tokens is not False,
            "packing": _may_pack(plan),
        }

    def check_workload(self, workload: Workload) -> None:
        """Check that a workload is an evaluation whose windows are longer than the stride.

        Raises:
            ConfigError: the workload is another one.
        """
        kind, position = workload.kind, workload.position
        if kind != "eval":
            raise ConfigError(f"workload.kind is {kind}; eval runs plans for evaluation, set it to eval")
        if self.stride(position) >= position:
            raise ConfigError(
                f"task.stride is {self.config.stride}, and windows have {position} tokens (workload.position); it must "
                f"be at most {position - 1}, so that every token has one before it"
            )

    def divide(self, store: TextStore, pieces: Sequence[Any], special: SpecialTokens, plan: Plan) -> LossWindows:
        """Divide texts into windows, and pack several into a sequence if that gives fewer sequences."""
        special = SpecialTokens((), ()) if self.config.special_tokens is False else special
        position = plan.workload.position
        texts = store.texts
        return divide_texts(
            [text.id for text in texts], pieces, [text.characters for text in texts], special, position,
            self.stride(position), _may_pack(plan),
        )  # fmt: skip

    def program(self, model: Model, plan: Plan, mesh: Mesh, windows: LossWindows) -> Program:
        """Return the evaluation step."""
        return step_program(model, plan, mesh, windows.is_packed)

    def summarize(self, store: TextStore, plan: Plan, results: Iterable[pa.Table]) -> dict[str, Any]:
        """Return the measures of all texts together, and of each text."""
        summary = summarize([text.id for text in store.texts], results)
        if summary["total"]["loss_per_token"] is None:
            logger.warning("the loss is not finite: the weights, or activations in compute_dtype, hold NaN or infinity")
        return summary


def _may_pack(plan: Plan) -> bool:
    """Return whether several windows may share a sequence.

    They may not if devices share the positions of a sequence, or if Native Sparse Attention would select blocks with
    tokens of two windows.
    """
    is_sparse = any(isinstance(method.kernel, SparseKernel) for method in plan.attention.methods)
    return not is_sparse and not plan.compute_mapping.get(plan.model.position)
