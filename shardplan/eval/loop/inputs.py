"""The sequences of the next shards, which worker processes make before the devices need them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from shardplan.eval.loop.shards import Shards
from shardplan.eval.windows import Rows

SHARDS_AHEAD = 2
"""Number of shards whose sequences are made before the devices need them."""


class InputsAhead:
    """Makes the sequences of shards ahead of time, for the lanes (parts of a batch) that this process computes."""

    def __init__(
        self,
        shards: Shards,
        remaining: Iterable[int],
        lanes: Iterable[int],
        make: Callable[[int, int], Future[Rows]],
        check_token: Callable[[int], None] | None = None,
    ):
        """Start to make the sequences of the first shards.

        Args:
            shards: all shards of the run.
            remaining: the shards to make, in the order in which the devices need them.
            lanes: the lanes that this process computes.
            make: starts to make the sequences from a first to a last one, in another thread or process.
            check_token: raises if the model has no embedding for a token.
        """
        self.shards = shards
        self._remaining, self._lanes = iter(remaining), tuple(lanes)
        self._make, self._check_token = make, check_token
        self._started: deque[tuple[int, dict[int, Future[Rows]]]] = deque()
        for _ in range(SHARDS_AHEAD):
            self.start_next()

    def start_next(self) -> None:
        """Start to make the sequences of the next shard, if there is one."""
        shard = next(self._remaining, None)
        if shard is not None:
            futures = {lane: self._make(*self.shards.lane_range(shard, lane)) for lane in self._lanes}
            self._started.append((shard, futures))

    def take(self, shard: int) -> dict[int, Future[Rows]]:
        """Return lane -> the sequences of `shard`, which must be the next of the remaining shards."""
        started, futures = self._started.popleft()
        assert started == shard, f"shard {started} is next, not {shard}"
        return futures

    def check(self, rows: Mapping[int, Rows]) -> None:
        """Check that the model has an embedding for every token of some sequences, as `check_token` does."""
        if self._check_token is not None:
            self._check_token(max(int(each.inputs[0].max()) for each in rows.values()))
