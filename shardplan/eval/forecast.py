"""Estimates how long a run over the texts takes with a plan."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.errors import CheckpointError, ConfigError
from shardplan.eval.task import EvaluationTask
from shardplan.eval.texts.encoding import make_tokenizer
from shardplan.eval.texts.reader import SpecialTokens, make_source, special_tokens
from shardplan.eval.texts.store import TextStore
from shardplan.eval.texts.tokenizer import read_tokenizer
from shardplan.eval.workers import count_tokens, open_workers
from shardplan.plan.plan import Plan
from shardplan.runtime.progress import Progress, show_progress
from shardplan.storage import open_folder

CHARACTERS_PER_TOKEN = 4
"""Approximate characters per token of English texts, used if the tokenizer is not available."""


@dataclass(frozen=True)
class RunForecast:
    """The number of windows of a run, and the seconds they take by its plan's estimate."""

    windows: int
    sequences: int
    steps: int
    seconds: float
    """Seconds of all steps."""
    characters_per_token: int | None
    """Assumed characters per token, if the tokenizer is not available; None if tokens were counted."""


def forecast_run(task: EvaluationTask[Any], store: TextStore, ref: str, plan: Plan) -> RunForecast:
    """Count the windows of the texts, and estimate how long they take with a plan.

    Args:
        ref: the checkpoint; if it has no tokenizer, the number of tokens is estimated.

    Raises:
        ConfigError: the plan is not for this task, or no text has a window.
    """
    task.check_workload(plan.workload)
    try:
        data = read_tokenizer(open_folder(ref))
    except (CheckpointError, ConfigError):  # of a plan from a config.json alone
        data = None
    special = SpecialTokens((0,), ())  # as many as most tokenizers add
    pieces = [np.array([-(-text.characters // CHARACTERS_PER_TOKEN)]) for text in store.texts]
    if data is not None:
        special = special_tokens(make_tokenizer(data, ref))
        pieces = _count_tokens(store, data, ref) if task.counts_tokens else []
    windows = task.divide(store, pieces, special, plan)
    steps = -(-windows.sequences // plan.workload.batch)
    per_token = CHARACTERS_PER_TOKEN if data is None else None
    total = windows.count(windows.sequences).windows
    return RunForecast(total, windows.sequences, steps, steps * plan.cost.step_seconds, per_token)


def _count_tokens(store: TextStore, tokenizer: bytes, name: str) -> list[np.ndarray]:
    """Return the number of tokens of every piece of every text, int64[piece]."""
    source = make_source(store, tokenizer, name)
    with open_workers(source, os.cpu_count() or 1) as workers:
        pieces = source.all_pieces
        with show_progress(Progress("counting tokens", "pieces of text", len(pieces))) as progress:
            return source.by_text(count_tokens(workers, pieces, progress.update)[0])
