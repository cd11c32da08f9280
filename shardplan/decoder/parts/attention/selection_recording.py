"""Records the blocks that layers with Native Sparse Attention select, while a forward pass is traced.

Nothing is recorded outside of `record_selection`, and no statistics are traced then.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums


@dataclass
class SelectionRecording:
    """The blocks that layers with Native Sparse Attention selected in one forward pass, as sums for statistics."""

    segments: list[tuple[SelectionSums, ...]] = field(default_factory=list)
    """Sums [repetition, ...] of each loop over layers, one per layer of its block with Native Sparse Attention."""
    sums: list[SelectionSums] = field(default_factory=list)
    """Sums of the layers outside of loops, or of one repetition, in the order of the model."""

    def of_repetition(self) -> AbstractContextManager["SelectionRecording"]:
        """Record one repetition of a block of layers separately, until the context's block ends."""
        return record_selection()

    def layers(self) -> tuple[SelectionSums, ...]:
        """Return the recorded sums of each layer in `sums`."""
        return tuple(self.sums)


_recording: ContextVar[SelectionRecording | None] = ContextVar("selection_recording", default=None)


def selection_recording() -> SelectionRecording | None:
    """Return the recording of the forward pass being traced; None if nothing is recorded.

    >>> selection_recording() is None
    True
    >>> with record_selection() as recording:
    ...     selection_recording() is recording
    True
    """
    return _recording.get()


@contextmanager
def record_selection() -> Iterator[SelectionRecording]:
    """Record the forward passes that are traced within the context's block.

    >>> with record_selection() as recording:
    ...     selection_recording().sums.append("the sums of a layer")
    >>> recording.layers()
    ('the sums of a layer',)
    """
    recording = SelectionRecording()
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)
