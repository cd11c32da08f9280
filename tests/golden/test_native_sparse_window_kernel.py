"""Kernels of the window branch in JAX's interpreter, against dense masks in NumPy and float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native_sparse_kernels import BASE, Inputs, check_gradients, dense_attention, dense_gradients

from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.window.kernel import attend_to_windows_by_kernel


@pytest.mark.parametrize(
    ("changes", "first", "count"),
    [
        pytest.param({}, 0, 75, id="start of a sequence"),
        pytest.param({"window": 129, "value_size": 8}, 64, 130, id="window longer than what is before it"),
        pytest.param({"window": 300, "heads_per_group": 16, "groups": 1}, 512, 40, id="end of a sequence"),
        pytest.param({"window": 1300, "heads_per_group": 1, "groups": 1}, 896, 150, id="two steps of blocks",
                     marks=pytest.mark.whole),
        pytest.param({"window": 512, "heads_per_group": 16, "key_size": 16}, 256, 700, id="sizes of the paper",
                     marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_window_kernel(changes, first, count):
    """Output and gradients of a run of queries; what is in the halo before the sequence is never seen."""
    nsa = replace(BASE, **changes)
    config, halo = NativeSparseConfig(**vars(nsa)), nsa.window - 1
    inputs = Inputs.make(nsa, range(first, first + count), halo + count, 2)
    queries, keys, values, gradients = inputs.float32()

    def attend(*arrays):
        return attend_to_windows_by_kernel(config, jnp.int32(first), *arrays)

    with jax.debug_nans(True):
        output, backward = jax.vjp(jax.jit(attend), queries, keys, values)
        found = backward(gradients)
    key_positions = np.arange(first - halo, first + count)
    distances = inputs.positions[:, None] - key_positions
    is_visible = ((distances >= 0) & (distances < nsa.window) & (key_positions >= 0))[None, :, None]
    expected, _ = dense_attention(inputs.queries, inputs.keys, inputs.values, is_visible)
    assert np.abs(np.asarray(output) - expected).max() < 1e-5
    check_gradients(found, dense_gradients(inputs, is_visible))
    for gradient in found[1:]:
        assert not gradient[:, key_positions < 0].any()


def test_a_window_longer_than_the_sequence():
    """The halo is no longer than the sequence, so that it is shorter than the window."""
    nsa = replace(BASE, window=1000)
    config, inputs = NativeSparseConfig(**vars(nsa)), Inputs.make(nsa, range(40), 79)
    queries, keys, values, _ = inputs.float32()
    output = attend_to_windows_by_kernel(config, jnp.int32(0), queries, keys, values)
    key_positions = np.arange(-39, 40)
    is_visible = (key_positions >= 0) & (key_positions <= inputs.positions[:, None])
    expected, _ = dense_attention(inputs.queries, inputs.keys, inputs.values, is_visible[None, :, None])
    assert np.abs(np.asarray(output) - expected).max() < 1e-5
