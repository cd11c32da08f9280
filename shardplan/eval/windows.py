"""Windows of texts, and the sequences that they are packed into. Imports no JAX, because worker processes use it.

| word | meaning |
|---|---|
| window | tokens of one text that are scored together; a row of the results |
| sequence | a row of the batch: one window, or several that are packed into it |
| step | one run of the program, on `batch` sequences |
| lane | the sequences of a step that the same devices compute |
| shard | the sequences of some steps, whose results are written together (`shardplan.eval.loop.shards`) |
| part | the file with the results of a shard that one process writes (`shardplan.eval.run_results.folder`) |
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from shardplan.eval.texts.reader import TextReader
from shardplan.monitoring.step_statistics import Count


@dataclass(frozen=True)
class Rows:
    """Sequences of a run, and the facts about their windows that are known without the model."""

    inputs: tuple[np.ndarray, ...]
    """Arguments of the program after the model, each [sequence, position]; the first is int32 tokens."""
    windows: Mapping[str, np.ndarray]
    """Column -> values [window, ...], in the order of the windows; the task chooses the columns."""

    def with_input(self, array: np.ndarray) -> "Rows":
        """Return the sequences with an additional argument of the program, [sequence, position]."""
        return replace(self, inputs=(*self.inputs, array))


class SequenceJob(Protocol):
    """Makes sequences of a run in a worker process, to which the job is pickled."""

    def make(self, texts: TextReader) -> Rows:
        """Make the sequences."""


class Windows(Protocol):
    """The windows of all texts, numbered and packed into sequences in the same order in every run."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""

    def count(self, sequences: int) -> Count:
        """Count the windows and tokens in the first `sequences` sequences.

        The windows of a sequence have consecutive numbers, which continue the numbers of the sequence before.
        """

    def job(self, first: int, last: int) -> SequenceJob:
        """Return the job that makes the sequences from `first` to `last`; sequences past the end are padding."""

    def table(self, first: int, rows: Rows, scores: Mapping[str, np.ndarray]) -> pa.Table:
        """Return the results of some sequences, one row per window.

        Args:
            first: number of the first window in these sequences.
            scores: output of the program -> [sequence, position].
        """

    def find_tokens(self, rows: Rows) -> np.ndarray:
        """Return bool[sequence, position]: True for tokens of windows, False for padding."""
