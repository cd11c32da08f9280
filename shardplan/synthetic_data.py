"""Synthetic training data: a component of Levanter's `data` section that needs no files.

A sequence follows a fixed Markov chain. The first `STATES` tokens of the vocabulary occur. Each has one successor,
which follows it with the probability `REGULAR`; otherwise any of them follows. A model first learns which tokens occur,
and then their successors: its loss falls from ln(vocabulary) to about 0.9 nats per token. A sequence is a function of
its index and of the seed alone, so that a run that goes on elsewhere reads what the first one would have read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import draccus
import haliax as hax
import numpy as np
from levanter.data.dataset import AsyncDataset
from levanter.data.text.datasets import CausalLmDataset, DatasetComponentBase, DirectDatasetComponent
from levanter.data.text.examples import GrugLmExample

COMPONENT_TYPE = "shardplan_synthetic"
"""`type` of the component in Levanter's `data` section."""
STATES = 256
"""Maximum number of different tokens that occur in the data."""
REGULAR = 0.9
"""Probability that a token is followed by its regular successor."""
TRAINING_SEQUENCES = 2**31
"""Number of training sequences before the data repeats: more than any run reads."""


class MarkovSequences(AsyncDataset[dict[str, np.ndarray]]):
    """Sequences of a Markov chain, each computed when it is read."""

    def __init__(self, vocab_size: int, position: int, seed: int, first: int, count: int):
        """Describe `count` sequences of `position` tokens; the first one has the index `first`."""
        self._states, self._position = min(vocab_size, STATES), position
        self._seed, self._first, self._count = seed, first, count
        order = np.random.default_rng(seed).permutation(self._states)
        self._successors = np.empty_like(order)
        self._successors[order] = np.roll(order, -1)  # one cycle of all tokens

    async def async_len(self) -> int:
        """Return the number of sequences."""
        return self._count

    def is_finite(self) -> bool:
        """Return whether the number of sequences is known."""
        return True

    async def get_batch(self, indices: Sequence[int]) -> Sequence[dict[str, np.ndarray]]:
        """Return the sequences of the given indices, each int32[position]."""
        return [{"input_ids": self._make(self._first + int(index))} for index in indices]

    def _make(self, index: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, index])
        tokens = rng.integers(0, self._states, self._position, dtype=np.int32)
        is_regular = rng.random(self._position) < REGULAR
        for i in range(1, self._position):
            if is_regular[i]:
                tokens[i] = self._successors[tokens[i - 1]]
        return tokens


@DatasetComponentBase.register_subclass(COMPONENT_TYPE)
@dataclass(frozen=True)
class SyntheticComponent(DirectDatasetComponent):
    """Synthetic data in Levanter's `data` section, as `components: {synthetic: {type: shardplan_synthetic, ...}}`."""

    datasets: Mapping[str, AsyncDataset[GrugLmExample]] = field(init=False, repr=False, compare=False)
    vocab_size: int = field(kw_only=True)
    """Number of tokens in the vocabulary."""
    position: int = field(kw_only=True)
    """Tokens per sequence, as `train_seq_len`."""
    validation_sequences: int = field(kw_only=True)
    """Number of sequences that are for evaluation only."""
    seed: int = 0

    def __post_init__(self) -> None:
        axis = hax.Axis("position", self.position)
        parts = {"train": (0, TRAINING_SEQUENCES), "validation": (TRAINING_SEQUENCES, self.validation_sequences)}
        datasets = {}
        for split, (first, count) in parts.items():
            sequences = MarkovSequences(self.vocab_size, self.position, self.seed, first, count)
            datasets[split] = CausalLmDataset(sequences, axis, block_cross_document_attention=False)
        object.__setattr__(self, "datasets", datasets)


def _encode(component: SyntheticComponent, declared: Any = None) -> dict[str, Any]:
    """Convert the component to a section, which Levanter writes to its logs."""
    keys = ("vocab_size", "position", "validation_sequences", "seed")
    return {"type": COMPONENT_TYPE, **{key: getattr(component, key) for key in keys}}


draccus.encode.register(SyntheticComponent, _encode)
