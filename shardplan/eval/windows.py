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
    """Some sequences of a run, and what is known without the model of the windows in them."""

    inputs: tuple[np.ndarray, ...]
    """The arguments of the program after the model, each [sequence, position]; int32 tokens first."""
    windows: Mapping[str, np.ndarray]
    """Column -> [window, ...], in the order of the windows; a task chooses the columns."""

    def with_input(self, array: np.ndarray) -> "Rows":
        """Return the sequences with one more argument of the program, [sequence, position]."""
        return replace(self, inputs=(*self.inputs, array))


class SequenceJob(Protocol):
    """Makes some sequences of a run in a worker process, to which it is pickled."""

    def make(self, texts: TextReader) -> Rows:
        """Make the sequences."""


class Windows(Protocol):
    """The windows of all texts, numbered and packed into sequences in an order that every run agrees on."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""

    def count(self, sequences: int) -> Count:
        """Count the windows and tokens in the first `sequences` sequences.

        The windows of a sequence have consecutive numbers, which follow those of the sequence before.
        """

    def job(self, first: int, last: int) -> SequenceJob:
        """Return the job that makes the sequences from `first` to `last`; those past the end are padding."""

    def table(self, first: int, rows: Rows, scores: Mapping[str, np.ndarray]) -> pa.Table:
        """Return the results of some sequences, a row per window.

        Args:
            first: number of their first window.
            scores: output of the program -> [sequence, position].
        """

    def find_tokens(self, rows: Rows) -> np.ndarray:
        """Return bool[sequence, position]: True for tokens of windows, False for padding."""
