"""The block of routed experts, from named arrays to named arrays."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from haliax.axis import axis_name
from haliax.partitioning import physical_axis_name
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from shardplan.errors import ConfigError
from shardplan.experts.expert_weights import ExpertFunction, ExpertWeights, LocalWeights, gather_weights
from shardplan.experts.local_rounds import sum_local_experts
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.experts.statistics.recording import device_rows_spec, is_recording, take_device_rows, with_device_rows
from shardplan.experts.strategies.exchange_tokens import exchange_tokens
from shardplan.experts.tiles import buffer_rows
from shardplan.hardware.generations import Generation, generation_of_device
from shardplan.model.axis_sharding import mesh_axes_of
from shardplan.model.replaceable import Replaceable


@dataclass(frozen=True)
class RoutedCall:
    """The arguments of a call of `routed_mlp`, with the dimensions of arrays in the order that devices need."""

    Experts: Axis
    Mlp: Axis
    Embed: Axis
    x: NamedArray
    """Tokens, {..., embed}."""
    chosen: NamedArray
    """Indices of each token's experts, int32{..., k}."""
    routing_weights: NamedArray
    """Factors of the experts' outputs, float32{..., k}."""
    weights: ExpertWeights[NamedArray]
    """Weights of the experts, with the dimensions that `ExpertWeights` names."""
    function: ExpertFunction
    method: ExpertMethod | None = None

    @property
    def experts_per_token(self) -> int:
        """Number of experts per token."""
        return self.chosen.axes[-1].size


def routed_mlp(
    Experts: AxisSelector,
    Mlp: AxisSelector,
    Embed: AxisSelector,
    x: NamedArray,
    chosen: NamedArray,
    routing_weights: NamedArray,
    weights: ExpertWeights[NamedArray],
    function: ExpertFunction,
    method: ExpertMethod | None = None,
) -> NamedArray:
    """Compute for each token the weighted sum of the outputs of its experts.

    Within `replace_routed_mlp` it is computed by the method of a plan; otherwise by `method`.

    >>> Experts, Mlp, Embed = hax.make_axes(experts=2, mlp=1, embed=1)
    >>> up = hax.named(jnp.array([[[1.0]], [[10.0]]]), (Experts, Embed, Mlp))
    >>> weights = ExpertWeights(gate=None, up=up, down=hax.ones((Experts, Mlp, Embed)))
    >>> x, chosen = hax.named(jnp.array([[3.0]]), ("token", "embed")), hax.named(jnp.array([[0, 1]]), ("token", "k"))
    >>> halves, function = hax.full(chosen.axes, 0.5), ExpertFunction(lambda gate, up: up)
    >>> routed_mlp(Experts, Mlp, Embed, x, chosen, halves, weights, function).array.tolist()
    [[16.5]]

    Args:
        Experts: axis of the experts, in their weights.
        Mlp: axis of the hidden states, in the weights.
        Embed: axis of the elements of a token, in `x`. It may have another name in the weights, so that it can be
            mapped separately there.
        x: {..., embed}, sharded by the active axis mapping, which does not shard embed.
        chosen: int32{..., k}, the numbers of each token's experts; k is the axis that `x` does not have.
        routing_weights: float32{..., k}, the factors of the chosen experts' outputs.
        weights: the weights of all experts.
        function: what experts compute besides matmuls.
        method: how experts are computed; default: tokens are gathered.

    Returns:
        The axes of `x`, in their order.

    Raises:
        ConfigError: the axis mapping shards the elements of a token; or tokens are exchanged, and a mesh axis shards
            experts but not tokens.
    """
    axes, embed = x.axes, x.resolve_axis(axis_name(Embed))
    tokens = tuple(axis for axis in axes if axis != embed)
    choices = tuple(axis for axis in chosen.axes if axis not in tokens)
    by_token = (*tokens, *choices)
    arrays = _order_weights(weights, axis_name(Experts), axis_name(Mlp))
    call = RoutedCall(
        Experts=arrays.up.axes[0],
        Mlp=arrays.up.axes[-1],
        Embed=embed,
        x=x.rearrange((*tokens, embed)),
        chosen=chosen.rearrange(by_token),
        routing_weights=routing_weights.rearrange(by_token).astype(jnp.float32),
        weights=arrays,
        function=function,
        method=method,
    )
    return _compute_call(call).rearrange(axes)


def compute_routed_mlp(
    call: RoutedCall, method: ExpertMethod | None = None, generation: Generation | None = None
) -> NamedArray:
    """Compute a call of `routed_mlp` on the devices of the mesh; raises the errors of `routed_mlp`.

    Args:
        method: how experts are computed; default: the method of the call.
        generation: generation of the TPUs that run it; default: the generation of JAX's devices.
    """
    arrays, embed = call.weights, call.Embed
    program = DeviceProgram(
        token_axes=tuple(name for axis in call.x.axes[:-1] for name in mesh_axes_of(axis)),
        expert_axes=mesh_axes_of(call.Experts),
        mlp_axes=mesh_axes_of(call.Mlp),
        experts=call.Experts.size,
        function=replace(call.function, generation=generation or generation_of_device(jax.devices()[0].device_kind)),
        method=method or call.method or ExpertMethod(),
    )
    if mesh_axes_of(embed):
        raise ConfigError(
            f"experts: the axis mapping shards {embed.name} in computations; experts need whole tokens: remove "
            f"{embed.name} from the compute mapping"
        )
    program.check()
    x, chosen, routing_weights = call.x, call.chosen, call.routing_weights
    inputs = DeviceInputs(x.array, chosen.array, routing_weights.array, arrays.map(lambda each: each.array))
    run: Callable[[DeviceInputs[Array]], Any] = with_device_rows(program.run) if is_recording() else program.run
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # a device needs all inputs and outputs of its experts, whatever shards their axis
        weight_specs = arrays.map(lambda each: _spec(each, {call.Experts.name, call.Mlp.name}))
        specs = DeviceInputs(_spec(x), _spec(chosen), _spec(routing_weights), weight_specs)
        out_specs = (specs.x, device_rows_spec(mesh)) if is_recording() else specs.x
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=False)
    outputs = run(inputs)
    return hax.named(take_device_rows(outputs) if is_recording() else outputs, x.axes)


_compute_call: Replaceable[[RoutedCall], NamedArray] = Replaceable(compute_routed_mlp)
replace_routed_mlp = _compute_call.replaced_by
"""Replaces the computation of `routed_mlp` within a context, as traces and plans do, by a function that takes a call
and returns its result with the axes of `RoutedCall.x`."""


class DeviceInputs[Leaf](NamedTuple):
    """The arrays of a block of experts: all of them, one device's shards of them, or their specs."""

    x: Leaf
    """Tokens, [..., embed]."""
    chosen: Leaf
    """Indices of each token's experts, int32[..., k]."""
    routing_weights: Leaf
    """Factors of the experts' outputs, float32[..., k]."""
    weights: ExpertWeights[Leaf]


@dataclass(frozen=True)
class DeviceProgram:
    """One device's part of a block of experts, inside `jax.shard_map` or on a single device."""

    token_axes: tuple[str, ...]
    """Mesh axes that shard tokens."""
    expert_axes: tuple[str, ...]
    """Mesh axes that shard experts."""
    mlp_axes: tuple[str, ...]
    """Mesh axes that shard hidden states."""
    experts: int
    """Number of experts on all devices."""
    function: ExpertFunction
    method: ExpertMethod

    def check(self) -> None:
        """Check that the strategy supports this sharding of the arrays.

        Raises:
            ConfigError: tokens are exchanged over a mesh axis along which all devices have the same tokens.
        """
        others = [axis for axis in self.expert_axes if axis not in self.token_axes]
        if others and self.method.strategy == ExpertStrategy.EXCHANGE_TOKENS:
            raise ConfigError(
                f"experts: the mesh axis {others[0]} shards experts and no tokens, so that there is nothing to "
                "exchange along it; shard the batch over it, or use gather_tokens"
            )

    def run(self, inputs: DeviceInputs[Array]) -> Array:
        """Return the outputs of this device's tokens, [..., embed]."""
        tokens = _row_major(inputs.x.reshape(-1, inputs.x.shape[-1]))
        chosen, routing_weights = (a.reshape(len(tokens), -1) for a in (inputs.chosen, inputs.routing_weights))
        match self.method.strategy:
            case ExpertStrategy.GATHER_TOKENS:
                outputs = self._gather_tokens(tokens, chosen, routing_weights, inputs.weights)
            case ExpertStrategy.EXCHANGE_TOKENS:
                outputs = self._exchange_tokens(tokens, chosen, routing_weights, inputs.weights)
            case ExpertStrategy.GATHER_WEIGHTS:
                weights = gather_weights(inputs.weights, self.expert_axes, self.mlp_axes)
                outputs = sum_local_experts(tokens, chosen, routing_weights, weights, self.function)
        return _row_major(outputs).reshape(inputs.x.shape)

    def _gather_tokens(self, tokens: Array, chosen: Array, routing_weights: Array, weights: LocalWeights) -> Array:
        """Apply this device's experts to the tokens of all devices that share experts or hidden states with it."""
        group = DeviceGroup(self.token_axes, (*self.expert_axes, *self.mlp_axes))
        weights, first_expert = self._with_bias_once(weights), self._first_expert(weights)
        chunks = self.method.token_chunks if len(tokens) % self.method.token_chunks == 0 else 1
        sums = []
        parts_of_tokens = zip(*(jnp.split(each, chunks) for each in (tokens, chosen, routing_weights)), strict=True)
        for part, chosen_here, weights_here in parts_of_tokens:
            chosen_here = group.gather(chosen_here)
            balanced = chosen_here.size * len(weights.up) / self.experts
            sums_here = sum_local_experts(
                group.gather(part), chosen_here, group.gather(weights_here), weights, self.function,
                first_expert=first_expert, max_rows=buffer_rows(balanced, self.method.buffer_factor),
            )  # fmt: skip
            sums.append(group.reduce(sums_here))
        return jnp.concatenate(sums)

    def _exchange_tokens(self, tokens: Array, chosen: Array, routing_weights: Array, weights: LocalWeights) -> Array:
        """Send tokens to the devices of their experts, and sum the outputs that come back.

        Devices with shards of the hidden states of the same experts gather each other's tokens first.
        """
        group = DeviceGroup(self.token_axes, self.mlp_axes)
        tokens, chosen, routing_weights = map(group.gather, (tokens, chosen, routing_weights))
        weights = self._with_bias_once(weights)
        if self.expert_axes:
            rows = buffer_rows(chosen.size, self.method.buffer_factor)
            sums = exchange_tokens(tokens, chosen, routing_weights, weights, self.function, self.expert_axes, rows)
        else:
            sums = sum_local_experts(tokens, chosen, routing_weights, weights, self.function)
        return group.reduce(sums)

    def _first_expert(self, weights: LocalWeights) -> int | Array:
        """Return the index of this device's first expert."""
        return jax.lax.axis_index(self.expert_axes) * len(weights.up) if self.expert_axes else 0

    def _with_bias_once(self, weights: LocalWeights) -> LocalWeights:
        """Set the output bias to zero on all but one of the devices whose outputs are summed."""
        if weights.down_bias is None or not self.mlp_axes:
            return weights
        is_first = jax.lax.axis_index(self.mlp_axes) == 0
        return replace(weights, down_bias=jnp.where(is_first, weights.down_bias, 0))


def _row_major(tokens: Array) -> Array:
    """Keep each token contiguous; otherwise the compiler copies gathered tokens to and from its activation layout."""
    constrained: Array = with_layout_constraint(tokens, Layout(major_to_minor=(0, 1)))
    return constrained


@dataclass(frozen=True)
class DeviceGroup:
    """Devices along some mesh axes that compute outputs together.

    Each device gathers the tokens of all devices, computes its part of every output, and receives the summed outputs of
    its own tokens.
    """

    token_axes: tuple[str, ...]
    """Mesh axes that shard tokens."""
    axes: tuple[str, ...]
    """Mesh axes of the group."""

    @property
    def _gathered(self) -> tuple[str, ...]:
        """Mesh axes of the group that shard tokens."""
        return tuple(axis for axis in self.axes if axis in self.token_axes)

    @property
    def _summed(self) -> tuple[str, ...]:
        """Mesh axes of the group that do not shard tokens."""
        return tuple(axis for axis in self.axes if axis not in self.token_axes)

    def gather(self, array: Array) -> Array:
        """All-gather an array [tokens, ...] of a device."""
        return jax.lax.all_gather(array, self._gathered, tiled=True) if self._gathered else array

    def reduce(self, sums: Array) -> Array:
        """Add up the parts [all tokens, ...] of all devices, and return the sums of this device's tokens."""
        if self._gathered:
            sums = jax.lax.psum_scatter(sums, self._gathered, scatter_dimension=0, tiled=True)
        return jax.lax.psum(sums, self._summed) if self._summed else sums


def _order_weights(weights: ExpertWeights[NamedArray], experts: str, mlp: str) -> ExpertWeights[NamedArray]:
    """Put the axes of the arrays in the order that `ExpertWeights` describes."""
    inputs_first, outputs_last = (experts, ..., mlp), (experts, mlp, ...)
    return ExpertWeights(
        gate=_rearrange(weights.gate, inputs_first),
        up=weights.up.rearrange(inputs_first),
        down=weights.down.rearrange(outputs_last),
        gate_bias=_rearrange(weights.gate_bias, inputs_first),
        up_bias=_rearrange(weights.up_bias, inputs_first),
        down_bias=_rearrange(weights.down_bias, (experts, ...)),
    )


def _rearrange(array: NamedArray | None, axes: Any) -> NamedArray | None:
    return None if array is None else array.rearrange(axes)


def _spec(array: NamedArray, sharded: Container[str] | None = None) -> PartitionSpec:
    """Return the spec of an array under the active axis mapping.

    Args:
        sharded: names of the axes that may be sharded; default: all.
    """
    return PartitionSpec(
        *(physical_axis_name(axis) if sharded is None or axis.name in sharded else None for axis in array.axes)
    )
