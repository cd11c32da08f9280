"""Settings and parameters of Native Sparse Attention: what is refused, with which line, and what follows from them."""

from dataclasses import replace

import haliax as hax
import jax
import nsa_oracle as oracle
import numpy as np
import pytest
from haliax import Axis

import shardplan.decoder
from shardplan.decoder import NativeSparseAttention, NativeSparseConfig, SelectedMethod
from shardplan.decoder.parts.attention.sparse.config import CompressedRope, Compression
from shardplan.decoder.parts.attention.sparse.kernels.refusal import check_kernel
from shardplan.errors import ConfigError

NSA = oracle.Nsa(24, 2, 3, 8, 6, block=8, stride=4, selection_block=16, selected=4, window=10)
CONFIG = NativeSparseConfig(**vars(NSA))
PARAMETERS = oracle.make_parameters(NSA, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"local": 0}, "local is 0; it must be at least 1"),
        ({"initial": -1}, "initial is -1; it must be at least 0"),
        ({"hidden": -8}, "hidden is -8; it must be at least 0"),
        ({"theta": -1.0}, "theta is -1.0; it must be at least 0"),
        ({"stride": 3}, "block is 8; it must be a multiple of stride, 3"),
        ({"selection_block": 18}, "selection_block is 18; it must be a multiple of stride, 4"),
        ({"block": 20}, "block is 20; it must be at most selection_block, 16"),
        ({"selected": 2}, "selected is 2; it must be at least initial + local, 1 + 2"),
        ({"key_size": 7}, "key_size is 7; it must be even, or theta None, to rotate pairs of channels"),
        ({"compression": "liner"}, "compression is 'liner'; did you mean 'linear'?"),
        ({"compressed_rope": "all"}, "compressed_rope is 'all'; valid: block_start, none"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ConfigError) as raised:
        replace(CONFIG, **changes)
    assert str(raised.value) == message


@pytest.mark.slow
def test_layers_without_kernels():
    """The reason is known before anything is compiled."""
    config = replace(CONFIG, selection_block=20)
    check_kernel("attention", "selection_block", CONFIG.selection_block)
    layer = NativeSparseAttention.init(config, key=jax.random.key(0))
    x = hax.zeros((Axis("batch", 1), Axis("position", 40), config.Embed))
    with pytest.raises(ConfigError) as raised:
        layer(x, SelectedMethod.KERNEL)
    assert str(raised.value) == (
        "native sparse attention: selection_block is 20; kernels copy blocks of a multiple of 8 tokens: use 24, or "
        "another method"
    )


def test_choices_are_types():
    assert CONFIG.compression is Compression.MLP and CONFIG.compressed_rope is CompressedRope.BLOCK_START
    assert hash(CONFIG) == hash(replace(CONFIG, compression=Compression.MLP))
    assert replace(CONFIG, theta=None, key_size=7).rotary is None


def test_numbers_of_blocks():
    for positions in range(1, 50):
        assert CONFIG.compressed_blocks(positions) == sum(start + 8 <= positions for start in range(0, positions, 4))
        assert CONFIG.selection_blocks(positions) == len(range(0, positions, 16))


@pytest.mark.slow
@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("value_size", [6, 8])
def test_parameters(compression, value_size):
    """Those of the oracle, with axes of one name where sizes are equal."""
    nsa = replace(NSA, compression=compression.value, value_size=value_size)
    config = NativeSparseConfig(**vars(nsa))
    layer = NativeSparseAttention.init(config, key=jax.random.key(0))
    shapes = {name: parameter.array.shape for name, parameter in layer.parameters.items()}
    assert shapes == {name: array.shape for name, array in oracle.make_parameters(nsa, 0).items()}
    assert ("value_head_size" in {axis.name for axis in layer.parameters["o"].axes}) is (value_size != 8)
    assert layer.parameters["q"].axes == (config.Embed, config.KVHeads, config.QHeadsPerGroup, config.HeadSize)
    biases = {name for name, parameter in layer.parameters.items() if not parameter.array.any()}
    of_mlp = {"phi_k_b1", "phi_k_b2", "phi_v_b1", "phi_v_b2"} if compression is Compression.MLP else set()
    assert biases == {"gate_b", *of_mlp}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"k_slc": None, "phi_v_b2": None},
            "parameters k_slc, phi_v_b2 are missing; pass q, o, gate_w, gate_b, k_cmp, ",
        ),
        ({"k_sel": np.zeros(3)}, "parameter 'k_sel' is unknown with compression mlp; did you mean 'k_slc'?"),
        ({"phi_k_w": np.zeros(3)}, "parameter 'phi_k_w' is unknown with compression mlp; did you mean 'phi_k_w2'?"),
        (
            {"q": np.zeros((24, 6, 8))},
            "parameter 'q' has shape (24, 6, 8); it must be (24, 2, 3, 8), (embed, kv_head, q_heads_per_group, ",
        ),
    ],
)
def test_wrong_arrays(changes, message):
    arrays = {name: array for name, array in {**PARAMETERS, **changes}.items() if array is not None}
    with pytest.raises(ConfigError) as raised:
        NativeSparseAttention.from_arrays(CONFIG, arrays)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_public_names_of_the_decoder(raises_message):
    for name in shardplan.decoder.__all__:
        assert getattr(shardplan.decoder, name).__module__.startswith("shardplan.decoder.parts.attention.sparse.")
    assert {*shardplan.decoder.__all__} <= {*dir(shardplan.decoder)}
    with raises_message(AttributeError):
        _ = shardplan.decoder.DenseAttention
