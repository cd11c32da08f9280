"""Shards of a run: ranges of its sequences whose results are written together. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shards:
    """Divides the sequences of a run into shards, whose results are written together.

    Different devices compute the `lanes` parts of a step. Each lane takes its sequences from one part of the shard, so
    that a process reads only the texts of this part.
    """

    total: int
    """Number of sequences."""
    lanes: int
    lane_sequences: int
    """Sequences of one lane in one step."""
    steps: int
    """Number of steps in a shard; the last shard may have fewer."""

    @property
    def size(self) -> int:
        """Number of sequences in a shard."""
        return self.steps * self.lanes * self.lane_sequences

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.total // self.size)

    def range(self, shard: int) -> tuple[int, int]:
        """Return the first sequence of a shard, and one past the last."""
        return shard * self.size, min((shard + 1) * self.size, self.total)

    def steps_of(self, shard: int) -> int:
        """Return the number of steps of a shard."""
        left = self.total - shard * self.size
        return min(self.steps, -(-left // (self.lanes * self.lane_sequences)))

    def lane_range(self, shard: int, lane: int) -> tuple[int, int]:
        """Return the first sequence of a lane in a shard, and one past the last; some may be past the total."""
        size = self.steps_of(shard) * self.lane_sequences
        first = shard * self.size + lane * size
        return first, first + size

    def step_ranges(self, shard: int, step: int) -> list[tuple[int, int]]:
        """Return the sequences of every lane in one step of a shard, without sequences past the total."""
        firsts = (self.lane_range(shard, lane)[0] + step * self.lane_sequences for lane in range(self.lanes))
        return [(min(first, self.total), min(first + self.lane_sequences, self.total)) for first in firsts]
