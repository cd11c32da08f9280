"""The interface of an evaluation's task; the run, its loop and its results folder are shared by all tasks."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from jax.sharding import Mesh

from shardplan.config.sections import TaskConfig
from shardplan.eval.texts.reader import SpecialTokens
from shardplan.eval.texts.store import TextStore
from shardplan.eval.windows import Windows
from shardplan.execution.aot_program import Program
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload


class EvaluationTask[W: Windows](Protocol):
    """The interface of an evaluation task, such as the loss or the extraction of texts."""

    @property
    def config(self) -> TaskConfig:
        """The user's configuration."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of the results; the first ones are `window` and `text`."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the arrays [batch, position] that the program returns."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the windows depend on the number of tokens of each text."""

    @property
    def shard_windows(self) -> int:
        """Most windows of a shard; a shard has as many complete steps as fit, but at least one."""

    def determinants(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that determine the results, besides texts, tokenizer, weights and types."""

    def check_workload(self, workload: Workload) -> None:
        """Check that a workload suits this task.

        Raises:
            ConfigError: the workload does not suit the task.
        """

    def divide(self, store: TextStore, pieces: Sequence[np.ndarray], special: SpecialTokens, plan: Plan) -> W:
        """Divide texts into windows.

        Args:
            pieces: for each text int64[piece], the number of tokens of its pieces; empty unless `counts_tokens`.

        Raises:
            ConfigError: no text has a window.
        """

    def program(self, model: Model, plan: Plan, mesh: Mesh, windows: W) -> Program:
        """Return the program of a step."""

    def summarize(self, store: TextStore, plan: Plan, results: Iterable[pa.Table]) -> dict[str, Any]:
        """Return the task's parts of the summary: at least `total`, and `texts` by id.

        Raises:
            ConfigError: no text has a window.
        """
