"""Names, axes and initial values of the parameters of Native Sparse Attention.

All weights of heads, of gates and of the compression have the axis kv_head, so that they are sharded together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from shardplan.decoder.parts.attention.sparse.config import Compression, NativeSparseConfig
from shardplan.decoder.parts.linear import INITIAL_SCALE
from shardplan.errors import ConfigError, nearest


@dataclass(frozen=True)
class SparseParameter:
    """A parameter: its axes, in the order of its array, and whether it is a bias."""

    axes: tuple[Axis, ...]
    is_bias: bool = False

    def init(self, key: jax.Array) -> NamedArray:
        """Make random weights, or zeros for biases."""
        return hax.zeros(self.axes) if self.is_bias else hax.random.normal(key, self.axes) * INITIAL_SCALE


def parameter_table(config: NativeSparseConfig) -> dict[str, SparseParameter]:
    """Return name -> parameter, for all parameters of a layer.

    `q` and `o` project queries and the output; `k_cmp`, `v_cmp`, `k_slc`, `v_slc`, `k_win` and `v_win` project keys and
    values of the compressed, selected and window branch; `gate_w` and `gate_b` make gates; `phi_k_...` and `phi_v_...`
    compress keys and values: `pe` is added to the tokens of a block, `w` is the linear map, and `w1`, `b1`, `w2`, `b2`
    are the MLP.

    >>> sizes = {"embed": 8, "groups": 2, "heads_per_group": 4, "key_size": 4, "value_size": 4, "window": 4}
    >>> config = NativeSparseConfig(**sizes, block=4, stride=2, selection_block=4, selected=3, compression="mean")
    >>> [name for name in parameter_table(config) if name.startswith(("gate", "phi"))]
    ['gate_w', 'gate_b', 'phi_k_pe', 'phi_v_pe']
    """
    embed, groups, heads = config.Embed, config.KVHeads, config.QHeadsPerGroup
    table = {
        "q": SparseParameter((embed, groups, heads, config.HeadSize)),
        "o": SparseParameter((groups, heads, config.ValueHeadSize, embed)),
        "gate_w": SparseParameter((embed, groups, heads, config.Gates)),
        "gate_b": SparseParameter((groups, heads, config.Gates), is_bias=True),
    }
    for kind, size in (("k", config.HeadSize), ("v", config.ValueHeadSize)):
        for branch in ("cmp", "slc", "win"):
            table[f"{kind}_{branch}"] = SparseParameter((embed, groups, size))
        for name, parameter in _compression_table(config, kind, size).items():
            table[f"phi_{kind}_{name}"] = parameter
    return table


def _compression_table(config: NativeSparseConfig, kind: str, size: Axis) -> dict[str, SparseParameter]:
    """Return name without prefix -> parameter, for the compression of keys (`kind` k) or values (v)."""
    of_block = (config.KVHeads, Axis("block_position", config.block), size)
    hidden, output = Axis(f"phi_{kind}_hidden", config.hidden_size(size.size)), Axis(f"phi_{kind}_out", size.size)
    table = {"pe": SparseParameter(of_block)}
    match config.compression:
        case Compression.MEAN:
            pass
        case Compression.LINEAR:
            table["w"] = SparseParameter((*of_block, output))
        case Compression.MLP:
            table["w1"] = SparseParameter((*of_block, hidden))
            table["b1"] = SparseParameter((config.KVHeads, hidden), is_bias=True)
            table["w2"] = SparseParameter((config.KVHeads, hidden, output))
            table["b2"] = SparseParameter((config.KVHeads, output), is_bias=True)
    return table


def init_parameters(config: NativeSparseConfig, key: jax.Array) -> dict[str, NamedArray]:
    """Make random parameters."""
    table = parameter_table(config)
    keys = jax.random.split(key, len(table))
    return {name: parameter.init(each) for each, (name, parameter) in zip(keys, table.items(), strict=True)}


def name_arrays(config: NativeSparseConfig, arrays: Mapping[str, Any]) -> dict[str, NamedArray]:
    """Check given arrays, and return them with their axes as the parameters of a layer.

    >>> import numpy as np
    >>> sizes = {"embed": 8, "groups": 2, "heads_per_group": 4, "key_size": 4, "value_size": 4, "window": 4}
    >>> config = NativeSparseConfig(**sizes, block=4, stride=2, selection_block=4, selected=3, compression="mean")
    >>> name_arrays(config, {"phi_k_w1": np.zeros((2, 4, 4, 8))})
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: parameter 'phi_k_w1' is unknown with compression mean; did you mean 'phi_k_pe'?

    Args:
        arrays: name -> array, as `parameter_table` has them.

    Raises:
        ConfigError: an array is missing, unknown, or has another shape.
    """
    table = parameter_table(config)
    for name in arrays:
        if name not in table:
            raise ConfigError(
                f"parameter {name!r} is unknown with compression {config.compression}; {nearest(name, table)}"
            )
    missing = [name for name in table if name not in arrays]
    if missing:
        raise ConfigError(f"parameters {', '.join(missing)} are missing; pass {_words(table)}")
    parameters = {}
    for name, parameter in table.items():
        array, expected = jnp.asarray(arrays[name]), tuple(axis.size for axis in parameter.axes)
        if array.shape != expected:
            axes = _words(axis.name for axis in parameter.axes)
            raise ConfigError(f"parameter {name!r} has shape {array.shape}; it must be {expected}, ({axes})")
        parameters[name] = hax.named(array, parameter.axes)
    return parameters


def _words(names: Iterable[str]) -> str:
    return ", ".join(names)
