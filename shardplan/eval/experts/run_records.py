"""Adds up the records of experts in the steps of a run, shard by shard.

The record of a shard is written beside its results, so that a run that was interrupted has statistics of all windows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.decoder.layers.expert_layers import has_experts, records_by_layer
from shardplan.errors import ConfigError
from shardplan.eval.experts.summary import describe_experts
from shardplan.eval.run_results.folder import ResultsFolder
from shardplan.experts.statistics.layer_record import LayerRecord, add_records
from shardplan.experts.statistics.metrics import layer_metrics
from shardplan.model.registry import Model
from shardplan.runtime.devices import is_first_process

LayerRecords = dict[int, LayerRecord]
"""Index of a layer with experts -> its record."""


def check_has_experts(model: Model) -> None:
    """Refuse a model whose experts cannot be recorded.

    Raises:
        ConfigError: the model has no routed experts, or is computed by a class of Levanter or of the user.
    """
    if not model.is_decoder:
        raise ConfigError(
            f"expert_statistics is true, and {type(model.config).__name__} computes the model: statistics are those of "
            "shardplan's decoder; leave out expert_statistics, or model.levanter_class"
        )
    if not has_experts(model.config.segments):
        raise ConfigError(
            f"expert_statistics is true, and this {model.config.family} has no routed experts; leave it out"
        )


class ExpertRecords:
    """Records of how a run's tokens were routed to experts, the same in every process."""

    def __init__(self, model: Model, results: ResultsFolder):
        """Start the records of a run, or continue the records that earlier starts of the run left in `results`."""
        self._segments, self._results = model.config.segments, results
        self._of_shard: LayerRecords = {}

    def add(self, records: Sequence[Sequence[LayerRecord]]) -> dict[str, float]:
        """Add a step of the current shard, and return its metrics for trackers.

        Args:
            records: as `RoutingRecording.segments` has them.
        """
        of_step = {
            number: LayerRecord.from_arrays(record)
            for number, record in records_by_layer(self._segments, records).items()
        }
        self._of_shard = _add(self._of_shard, of_step)
        return {name: value.item() for name, value in layer_metrics(of_step).items()}

    def end_shard(self, first: int, last: int) -> None:
        """End the current shard, which has the windows from `first` to `last`; process 0 writes its record."""
        if is_first_process():
            self._results.write_experts(first, last, {str(n): each.to_json() for n, each in self._of_shard.items()})
        self._of_shard = {}

    def summarize(self, all_windows: int) -> dict[str, Any]:
        """Return the section `experts` of the summary, from the records of all shards.

        Args:
            all_windows: number of windows of the run.
        """
        total: LayerRecords = {}
        windows = 0
        for first, last, values in self._results.read_experts():
            windows += last - first
            total = _add(total, {int(number): LayerRecord.from_json(each) for number, each in values.items()})
        return describe_experts(total, windows, all_windows)


def _add(total: Mapping[int, LayerRecord], records: Mapping[int, LayerRecord]) -> LayerRecords:
    if not total:
        return dict(records)
    return {number: add_records(total[number], record) for number, record in records.items()}
