"""The task that measures how probable a model finds the words of texts, window by window."""

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
from shardplan.model.registry import Model
from shardplan.model.token_scores import TokenScores
from shardplan.plan.plan import Plan
from shardplan.plan.workload import Workload
from shardplan.step import score_program
from shardplan.step.aot_program import Program

SHARD_WINDOWS = 4096
"""Windows of a shard, unless the configuration says."""
DEFAULT_STRIDE = 5
"""Distance between the starts of two windows, unless the configuration says."""


@dataclass(frozen=True)
class ExtractionTask:
    """Measures the probability of the suffix of every window, given its prefix."""

    config: TaskConfig
    max_windows: int | None = None
    """Most windows to score, evenly spread over the texts; None for all."""
    outputs = TokenScores._fields

    @property
    def protocol(self) -> Protocol:
        """How texts are divided into windows."""
        task = self.config
        return Protocol(task.prefix, task.suffix, task.stride or DEFAULT_STRIDE, task.stride_unit)

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
        """Windows of a shard, if that is more than a step has."""
        return self.config.shard or SHARD_WINDOWS

    def determinants(self, plan: Plan) -> dict[str, Any]:
        """Return what determines the results beside texts, tokenizer, weights and types."""
        protocol = {"special_tokens": bool(self.config.special_tokens), **asdict(self.protocol)}
        sample = {} if self.max_windows is None else {"max_windows": self.max_windows}
        return {"task": "extraction", "protocol": protocol, "top_k": plan.workload.top_k, **sample}

    def check_workload(self, workload: Workload) -> None:
        """Check that a workload has windows of the protocol's length, and the top k that are asked for.

        Raises:
            ConfigError: it has not.
        """
        task = self.config
        if not workload.is_scoring:
            raise ConfigError(f"workload.kind is {workload.kind}; extraction needs the kind score")
        if workload.top_k != task.top_k:
            raise ConfigError(
                f"task.top_k is {task.top_k}, the plan has {workload.top_k}; set task.top_k to that, or plan again"
            )
        length, needed = workload.window or workload.position, self.protocol.length + bool(task.special_tokens)
        if length != needed:
            raise ConfigError(
                f"the plan is for windows of {length} tokens; task.prefix {task.prefix} and task.suffix {task.suffix} "
                f"need {needed}"
            )

    def divide(self, store: TextStore, pieces: Sequence[Any], special: SpecialTokens, plan: Plan) -> ExtractionWindows:
        """Number the windows of all texts."""
        if self.config.special_tokens and len(special.before) != 1:
            raise ConfigError(
                f"task.special_tokens is true, and the tokenizer adds {len(special.before)} tokens before a text; it "
                "must add one, or else leave task.special_tokens out"
            )
        first = special.before if self.config.special_tokens else ()
        texts = store.texts
        ids, characters = [text.id for text in texts], [text.characters for text in texts]
        return divide_texts(self.protocol, first, ids, pieces, characters, plan.workload.position, self.max_windows)

    def program(self, model: Model, plan: Plan, mesh: Mesh, windows: ExtractionWindows) -> Program:
        """Return the scoring step."""
        return score_program(model, plan, mesh)

    def summarize(self, store: TextStore, plan: Plan, results: Iterable[pa.Table]) -> dict[str, Any]:
        """Return what the probabilities say of each text and of all, and what plots of them show.

        Raises:
            ConfigError: no text has a window.
        """
        summary = summarize(results, store.texts, plan.workload.top_k)
        if summary["total"]["windows"] == 0:  # with a stride in characters this is known at the end alone
            raise no_window_error(self.protocol)
        return summary
