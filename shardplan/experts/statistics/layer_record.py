"""The statistics of one layer with routed experts, and metrics computed from them. Imports no JAX.

Records of several steps are added up. All figures follow from the sums, so that those of a run are not means of those
of its steps: a step with twice as many tokens counts twice.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np


class LayerRecord(NamedTuple):
    """The statistics of one layer's experts, as NumPy or JAX arrays, or of several layers in a leading dimension.

    A row is one token for one of the experts that it chose.
    """

    load: Any
    """Rows of each expert, padding tokens excluded, int[experts]."""
    tokens: Any
    """Number of tokens, padding excluded, int[]."""
    entropy: Any
    """Sum over tokens of the entropy of the router's probabilities, in nats, float[]."""
    largest_rows: Any
    """Rows of the device with most rows, padding included, summed over steps, int[]."""
    mean_rows: Any
    """Mean rows of a device, padding included, summed over steps, float[]."""
    buffer_use: Any
    """Most rows of a device / rows of its buffer, float[]; above 1, rows overflowed."""
    overflow_rows: Any
    """Rows of all devices that did not fit in the buffers, int[]."""
    further_rounds: Any
    """Number of rounds that the slowest device needed for overflow rows, int[]."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        return {name: value.tolist() for name, value in zip(self._fields, self, strict=True)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LayerRecord":
        """Read a record that `to_json` returned."""
        return cls(*(np.asarray(values[name]) for name in cls._fields))

    @classmethod
    def from_arrays(cls, arrays: "LayerRecord") -> "LayerRecord":
        """Return the record of one step in number types wide enough to be added up over a run."""
        wide = {"i": np.int64, "f": np.float64}
        return cls(*(np.asarray(array, wide[np.asarray(array).dtype.kind]) for array in arrays))


def add_records(first: LayerRecord, second: LayerRecord) -> LayerRecord:
    """Add two records of one layer.

    >>> step = LayerRecord(*map(np.asarray, ([3, 1], 2, 0.5, 3, 2.0, 0.75, 0, 0)))
    >>> both = add_records(step, step._replace(buffer_use=np.asarray(1.25)))
    >>> both.load.tolist(), both.tokens.item(), both.buffer_use.item()
    ([6, 2], 4, 1.25)
    """
    added = LayerRecord(*(one + other for one, other in zip(first, second, strict=True)))
    return added._replace(buffer_use=np.maximum(first.buffer_use, second.buffer_use))


def layer_figures(record: LayerRecord, xp: ModuleType = np) -> dict[str, Any]:
    """Compute statistics of a layer by name, each a scalar.

    | name | figure |
    |---|---|
    | load_max_over_mean | rows of the busiest expert, relative to the mean of all experts |
    | load_min_over_mean | rows of the least used expert, relative to the mean of all experts |
    | load_spread | standard deviation of the experts' rows, relative to the mean: `workload.expert_load_spread` |
    | load_entropy | entropy in nats of the rows' distribution over experts; log(experts) if all have equally many |
    | router_entropy | entropy in nats of the router's probabilities for a token, averaged over tokens |
    | device_rows_max_over_mean | rows of the busiest device, relative to the mean of devices |
    | buffer_use | most rows of a device, relative to the rows of its buffer |
    | overflow_rows | rows that did not fit in the buffers |
    | further_rounds | rounds for the rows that did not fit |

    >>> record = LayerRecord(*map(np.array, ([6, 2, 0, 0], 4, 4 * np.log(2), 6, 4.0, 0.75, 0, 0)))
    >>> {name: round(float(value), 3) for name, value in layer_figures(record).items() if "max" in name}
    {'load_max_over_mean': 3.0, 'device_rows_max_over_mean': 1.5}

    Args:
        xp: the module with functions for the record's arrays, `numpy` or `jax.numpy`.
    """
    rows = xp.maximum(record.load.sum(), 1)
    parts = record.load / rows
    entropy = -(parts * xp.log(xp.where(parts > 0, parts, 1.0))).sum()
    return {
        "load_max_over_mean": record.load.max() * len(record.load) / rows,
        "load_min_over_mean": record.load.min() * len(record.load) / rows,
        "load_spread": parts.std() * len(record.load),
        "load_entropy": entropy,
        "router_entropy": record.entropy / xp.maximum(record.tokens, 1),
        "device_rows_max_over_mean": record.largest_rows / record.mean_rows,
        "buffer_use": record.buffer_use,
        "overflow_rows": record.overflow_rows,
        "further_rounds": record.further_rounds,
    }


def expert_loads(record: LayerRecord, xp: ModuleType = np) -> Any:
    """Return each expert's fraction of all rows, float[experts].

    >>> expert_loads(LayerRecord(*map(np.asarray, ([3, 1], 2, 0.5, 3, 2.0, 0.75, 0, 0)))).tolist()
    [0.75, 0.25]
    """
    return record.load / xp.maximum(record.load.sum(), 1)
