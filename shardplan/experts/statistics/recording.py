"""Records how tokens are routed while a forward pass is traced.

Nothing is recorded outside of `record_routing`, and nothing is added to a program then. Within it, the parts of a model
hand over what only they know: routers their probabilities and choices, and device programs their rows and buffers.
Layers run in loops, and devices in `jax.shard_map`: what is recorded inside leaves them as further outputs, so that it
can be differentiated around, recomputed for gradients, and returned by the program.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import Array
from jax.scipy.special import entr
from jax.sharding import Mesh, PartitionSpec

from shardplan.experts.statistics.layer_record import LayerRecord


class RouterRecord(NamedTuple):
    """What the router of one layer has chosen; see `LayerRecord` for the fields."""

    load: Array
    tokens: Array
    entropy: Array


class DeviceRows(NamedTuple):
    """The rows that one device computes in a layer (arrays [1]), or that each device computes (arrays [device])."""

    rows: Array
    """Number of rows, int32."""
    buffer_use: Array
    """Largest use of a buffer, float32; above 1, rows did not fit."""
    overflow_rows: Array
    """Number of rows that did not fit in the buffer, int32."""
    further_rounds: Array
    """Number of rounds after the first, int32."""


@dataclass
class RoutingRecording:
    """How the tokens of one forward pass are routed to experts, layer by layer."""

    is_token: NamedArray | None = None
    """Whether each token counts, bool with the tokens' axes; None if all do."""
    segments: list[tuple[LayerRecord, ...]] = field(default_factory=list)
    """Records [repetition, ...] of each loop over layers, one per layer of its block with experts."""
    routers: list[RouterRecord] = field(default_factory=list)
    devices: list[DeviceRows] = field(default_factory=list)
    """Rows of the layers outside of loops, or of one repetition, in the order of the model, as `routers` are."""

    def of_repetition(self) -> AbstractContextManager["RoutingRecording"]:
        """Record one repetition of a block of layers separately, until the context's block ends."""
        return record_routing(self.is_token)

    def layers(self) -> tuple[LayerRecord, ...]:
        """Return the records of layers outside of loops, or of one repetition."""
        return tuple(_join(router, rows) for router, rows in zip(self.routers, self.devices, strict=True))


_recording: ContextVar[RoutingRecording | None] = ContextVar("routing_recording", default=None)
_rounds: ContextVar[list[DeviceRows] | None] = ContextVar("device_rounds", default=None)
"""Rows that a device's program has computed so far; None outside of a recorded program."""


def routing_recording() -> RoutingRecording | None:
    """Return the recording of the forward pass being traced; None outside of `record_routing`.

    >>> routing_recording()
    >>> with record_routing() as recording:
    ...     routing_recording() is recording
    True
    """
    return _recording.get()


def is_recording() -> bool:
    """Return whether the forward pass being traced is recorded.

    >>> is_recording()
    False
    >>> with record_routing():
    ...     is_recording()
    True
    """
    return _recording.get() is not None


@contextmanager
def record_routing(is_token: NamedArray | None = None) -> Iterator[RoutingRecording]:
    """Record the forward passes that are traced within the context's block.

    >>> import haliax as hax
    >>> chosen = hax.named(jnp.array([[3], [0]]), ("token", "k"))
    >>> with record_routing(is_token=hax.named(jnp.array([True, False]), "token")) as recording:
    ...     record_router(hax.named(jnp.full((2, 4), 0.25), ("token", "experts")), chosen)
    >>> recording.routers[0].load.tolist(), recording.routers[0].tokens.item()
    ([0, 0, 0, 1], 1)

    Args:
        is_token: bool with the axes of the tokens: which tokens count; None for all.
    """
    recording = RoutingRecording(is_token)
    token = _recording.set(recording)
    try:
        yield recording
    finally:
        _recording.reset(token)


def record_router(probabilities: NamedArray, chosen: NamedArray) -> None:
    """Record the experts that a router has chosen.

    >>> import haliax as hax
    >>> probabilities = hax.named(jnp.array([[0.0, 1.0], [1.0, 0.0]]), ("token", "experts"))
    >>> with record_routing() as recording:
    ...     record_router(probabilities, chosen=hax.named(jnp.array([[1], [0]]), ("token", "k")))
    >>> recording.routers[0].load.tolist(), recording.routers[0].entropy.item()
    ([1, 1], 0.0)

    Args:
        probabilities: float32{..., experts}, the experts last.
        chosen: int32{..., choices}, numbers of experts, with the other axes in the same order.
    """
    recording = _recording.get()
    assert recording is not None
    tokens = chosen.axes[:-1]
    counts = jnp.ones([axis.size for axis in tokens], bool)
    if recording.is_token is not None:
        counts = recording.is_token.rearrange(tokens).array
    values, experts = jax.lax.stop_gradient(probabilities.array), jnp.arange(probabilities.axes[-1].size)
    is_chosen = (chosen.array[..., None] == experts) & counts[..., None, None]
    recording.routers.append(
        RouterRecord(
            load=is_chosen.sum(range(is_chosen.ndim - 1), dtype=jnp.int32),
            tokens=counts.sum(dtype=jnp.int32),
            entropy=jnp.where(counts, entr(values).sum(-1), 0.0).sum(),
        )
    )


def with_device_rows(run: Callable[[Any], Array]) -> Callable[[Any], tuple[Array, DeviceRows]]:
    """Make a device's program return its result together with the rows that `record_rounds` records in it.

    >>> def run(tokens):
    ...     for part in (6, 3):
    ...         record_rounds(jnp.int32(part), buffer_rows=4, rounds=jnp.int32(-(-part // 4)))
    ...     return tokens
    >>> _, rows = with_device_rows(run)(jnp.zeros(9))
    >>> rows.rows.tolist(), rows.buffer_use.tolist(), rows.further_rounds.tolist()
    ([9], [1.5], [1])
    """

    def recorded(inputs: Any) -> tuple[Array, DeviceRows]:
        parts: list[DeviceRows] = []
        token = _rounds.set(parts)
        try:
            result = run(inputs)
        finally:
            _rounds.reset(token)
        # several parts are computed one after the other, each in buffers of its own
        by_field = DeviceRows(*(jnp.stack(values) for values in zip(*parts, strict=True)))
        return result, DeviceRows(
            rows=by_field.rows.sum(0),
            buffer_use=by_field.buffer_use.max(0),
            overflow_rows=by_field.overflow_rows.sum(0),
            further_rounds=by_field.further_rounds.sum(0),
        )

    return recorded


def device_rows_spec(mesh: Mesh) -> PartitionSpec:
    """Return the spec of the arrays of `DeviceRows`, which have one element per device of the mesh.

    >>> tuple(device_rows_spec(jax.sharding.AbstractMesh((2, 4), ("data", "model"))))
    (('data', 'model'),)
    """
    return PartitionSpec(tuple(mesh.axis_names))


def take_device_rows(outputs: tuple[Array, DeviceRows]) -> Array:
    """Record the rows of all devices, and return the result without them.

    >>> rows = DeviceRows(*(jnp.zeros(2) for _ in DeviceRows._fields))
    >>> with record_routing() as recording:
    ...     take_device_rows((jnp.ones(1), rows)).tolist()
    [1.0]
    >>> recording.devices[0] is rows
    True
    """
    recording = _recording.get()
    assert recording is not None
    recording.devices.append(outputs[1])
    return outputs[0]


def records_rounds() -> bool:
    """Return whether the device program being traced is recorded."""
    return _rounds.get() is not None


def record_rounds(rows: Array, buffer_rows: int, rounds: Array) -> None:
    """Record the rows that a device computes, and how many of them do not fit in its buffer.

    >>> def run(tokens):
    ...     record_rounds(jnp.int32(6), buffer_rows=4, rounds=jnp.int32(2))
    ...     return tokens
    >>> _, rows = with_device_rows(run)(jnp.zeros(6))
    >>> rows.overflow_rows.tolist(), rows.further_rounds.tolist()
    ([2], [1])

    Args:
        rows: int32[], rows of this device.
        buffer_rows: rows of the device's buffer.
        rounds: int32[], rounds in which the device takes part.
    """
    parts = _rounds.get()
    assert parts is not None
    device_rows = DeviceRows(
        rows=rows.astype(jnp.int32),
        buffer_use=rows / jnp.float32(buffer_rows),
        overflow_rows=jnp.maximum(rows - buffer_rows, 0).astype(jnp.int32),
        further_rounds=(rounds - 1).astype(jnp.int32),
    )
    parts.append(DeviceRows(*(value.reshape(1) for value in device_rows)))


def _join(router: RouterRecord, devices: DeviceRows) -> LayerRecord:
    return LayerRecord(
        *router,
        largest_rows=devices.rows.max(),
        mean_rows=devices.rows.astype(jnp.float32).mean(),
        buffer_use=devices.buffer_use.max(),
        overflow_rows=devices.overflow_rows.sum(),
        further_rounds=devices.further_rounds.max(),
    )
