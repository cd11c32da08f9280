"""The task that measures the probability of texts' words under a model, window by window."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from jax.sharding import Mesh

from shardplan.config.sections import StrideUnit, TaskConfig
from shardplan.errors import ConfigError
from shardplan.eval.extraction.summary import summarize
from shardplan.eval.extraction.windows import ExtractionWindows, Protocol, divide_texts, no_window_error, result_schema
from shardplan.eval.texts.reader import SpecialTokens
from shardplan.eval.texts.store import TextStore
from shardplan.execution import step_program
from shardplan.execution.aot_program import Program
from shardplan.model.logits.token_scores import TokenScores
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload

SHARD_WINDOWS = 4096
"""Default number of windows in a shard."""
DEFAULT_STRIDE = 5
"""Default distance between the starts of two windows."""


@dataclass(frozen=True)
class ExtractionTask:
    """Measures the probability of the suffix of every window, given its prefix."""

    config: TaskConfig
    max_windows: int | None = None
    """Maximum number of windows to score, evenly spread over the texts; None for all."""
    outputs = TokenScores._fields

    @property
    def protocol(self) -> Protocol:
        """The settings by which texts are divided into windows."""
        task = self.config
        return Protocol(task.prefix, task.suffix, task.stride or DEFAULT_STRIDE, task.stride_unit, task.bos_in_prefix)

    @property
    def schema(self) -> pa.Schema:
        """Columns of the results."""
        return result_schema(self.config.suffix)

    @property
    def counts_tokens(self) -> bool:
        """Whether the windows depend on the number of tokens of each text."""
        return self.config.stride_unit is StrideUnit.TOKENS

    @property
    def shard_windows(self) -> int:
        """Number of windows per shard; a shard has at least one step, even if a step has more windows."""
        return self.config.shard or SHARD_WINDOWS

    def determinants(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that determine the results, besides texts, tokenizer, weights and types."""
        protocol = {"special_tokens": self.config.begins_windows, **asdict(self.protocol)}
        # settings that are left out are not named, as in the folders of versions that did not have them
        if not self.protocol.bos_in_prefix:
            del protocol["bos_in_prefix"]
        others: dict[str, Any] = {}
        if plan.workload.temperature != 1:
            others["temperature"] = plan.workload.temperature
        if self.max_windows is not None:
            others["max_windows"] = self.max_windows
        return {"task": "extraction", "protocol": protocol, "top_k": plan.workload.top_k, **others}

    def check_workload(self, workload: Workload) -> None:
        """Check that a workload has the protocol's window length, and the task's top k and temperature.

        Raises:
            ConfigError: a setting of the workload differs.
        """
        task = self.config
        if not workload.is_scoring:
            raise ConfigError(f"workload.kind is {workload.kind}; extraction needs the kind score")
        for key in ("top_k", "temperature"):
            wanted, planned = getattr(task, key), getattr(workload, key)
            if wanted != planned:
                raise ConfigError(
                    f"task.{key} is {wanted:g}, the plan has {planned:g}; set task.{key} to that, or plan again"
                )
        length, needed = workload.window or workload.position, task.window_tokens
        if length != needed:
            raise ConfigError(
                f"the plan is for windows of {length} tokens; task.prefix {task.prefix} and task.suffix {task.suffix} "
                f"need {needed}"
            )

    def divide(self, store: TextStore, pieces: Sequence[Any], special: SpecialTokens, plan: Plan) -> ExtractionWindows:
        """Assign indices to the windows of all texts."""
        if self.config.begins_windows and len(special.before) != 1:
            key = "bos_in_prefix" if self.config.bos_in_prefix else "special_tokens"
            raise ConfigError(
                f"task.{key} is true, and the tokenizer adds {len(special.before)} tokens before a text; it must add "
                f"one, or else leave task.{key} out"
            )
        first = special.before if self.config.begins_windows else ()
        texts = store.texts
        ids, characters = [text.id for text in texts], [text.characters for text in texts]
        return divide_texts(self.protocol, first, ids, pieces, characters, plan.workload.position, self.max_windows)

    def program(self, model: Model, plan: Plan, mesh: Mesh, windows: ExtractionWindows) -> Program:
        """Return the scoring step."""
        return step_program(model, plan, mesh)

    def summarize(self, store: TextStore, plan: Plan, results: Iterable[pa.Table]) -> dict[str, Any]:
        """Summarize the probabilities, per text and over all texts, with the data of plots.

        Raises:
            ConfigError: no text has a window.
        """
        summary = summarize(results, store.texts, plan.workload.top_k)
        if summary["total"]["windows"] == 0:  # with a stride in characters this is known at the end alone
            raise no_window_error(self.protocol)
        return summary
