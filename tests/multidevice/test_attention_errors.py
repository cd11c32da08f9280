"""Arguments of attention that cannot be right are refused on one line."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import mesh_of
from levanter.layers.attention import AttentionMask

from shardplan.attention import dot_product_attention
from shardplan.errors import ConfigError
from shardplan.positions.sequence_layout import SequenceLayout


@pytest.mark.quick
def test_errors(raises_message):
    mesh = mesh_of(4)
    x, y = (
        hax.zeros(hax.make_axes(**{"kv_head": 2, name: 8, "head_size": 16})) for name in ("position", "key_position")
    )
    mapping, short = {"position": "model"}, hax.ones(hax.make_axes(position=4, key_position=8)) > 0
    allowed = hax.ones(hax.make_axes(position=8, key_position=8)) > 0
    by_head = AttentionMask.causal().with_segment_ids(hax.zeros(hax.make_axes(kv_head=2, position=8), dtype=int))
    for arguments, message in (
        ({"strategy": "rings"}, "attention strategy is 'rings'; did you mean 'ring'"),
        (
            {"strategy": "none"},
            "strategy none, but 4 devices shard position; use all_gather, ring, ulysses, hybrid or auto",
        ),
        ({"layout": "zig"}, "attention layout is 'zig'; did you mean 'zigzag'"),
        ({"strategy": "hybrid", "ulysses": 3}, "ulysses 3 does not divide the 4 devices along position"),
        ({"strategy": "hybrid", "ulysses": 0}, "ulysses 0 does not divide the 4 devices along position"),
        ({"mask": short}, "a mask or sink has the axis position"),
        ({"documents": [3, 4]}, "documents of 3, 4 positions do not add up to the 8 of the sequence"),
        (
            {"documents": [3, 4], "strategy": "auto"},
            "documents of 3, 4 positions do not add up to the 8 of the sequence",
        ),
        ({"strategy": "ring", "ulysses": 2}, "ulysses 2 is for the strategy hybrid; the strategy ring has ulysses 1"),
        (
            {"layout": SequenceLayout(8, 8, 1, "zigzag"), "strategy": "auto"},
            "ring 8 x ulysses 1, but 4 devices shard positions",
        ),
        ({"strategy": "auto", "hardware": "v5p-16"}, "hardware v5p-16 has 8 devices, the mesh 4"),
        ({"strategy": "auto", "hardware": "h100-4"}, "unknown generation 'h100'"),
        ({"block": 0}, "block is 0; it must be at least 1"),
        (
            {"mask": np.ones((8, 8), bool)},
            "the mask is a ndarray; it must be levanter.layers.attention.AttentionMask, or",
        ),
        (
            {"mask": AttentionMask(is_causal=True, causal_offset=1.5)},
            "causal_offset has dtype float32; it must be an int",
        ),
        (
            {"mask": AttentionMask(is_causal=True, causal_offset=np.array([1, 2]))},
            "causal_offset is array([1, 2]); it must be an integer, or a named array of integers",
        ),
        ({"mask": allowed.astype(float)}, "the explicit mask has dtype float32; it must be bool"),
        ({"prefix": jnp.int32(3)}, "prefix must be one number, known while tracing"),
        ({"axis_mapping": {"position": ("model", "model")}}, "mapped to one mesh axis twice: model, model"),
        (
            {"axis_mapping": {"position": "modle"}},
            "mapped to 'modle', which is no axis of the mesh; did you mean 'model'",
        ),
        ({"axis_mapping": {"position": "model", "kv_head": "model"}}, "kv_head and position are both mapped to model"),
        ({"axis_mapping": {"kv_head": "model"}}, "kv_head (2) is not divisible by the 4 devices that shard it"),
        ({"mask": by_head}, "a mask or sink has the axis kv_head (2); valid: position (8)"),
        (
            {"layout": SequenceLayout(8, 4), "axis_mapping": {"pos": "model"}},
            "no mesh axis of several devices shards posi",
        ),
        ({"kernel": "splash", "strategy": "ring"}, "each ring index has 2 positions, which must be a multiple of 128"),
        (
            {"kernel": "splash", "mask": allowed},
            "kernel splash does not support explicit masks; use the kernel blockwise",
        ),
    ):
        with jax.set_mesh(mesh), pytest.raises(ConfigError, match=re.escape(message)):
            dot_product_attention(
                "position", "key_position", "head_size", x, y, y, **{"axis_mapping": mapping, **arguments}
            )
    with (
        jax.set_mesh(jax.make_mesh((4,), ("model",))),
        raises_message(ConfigError),
    ):
        dot_product_attention("position", "key_position", "head_size", x, y, y, axis_mapping=mapping)
    with raises_message(ConfigError):
        dot_product_attention("position", "key_position", "head_size", x, y, y, axis_mapping=mapping)
    with raises_message(ConfigError):
        dot_product_attention("position", "position", "head_size", x, x, x)
    wide = y.broadcast_axis(hax.Axis("batch", 2))
    for queries in (x, x.broadcast_axis(hax.Axis("batch", 1))):
        with raises_message(ConfigError):
            dot_product_attention("position", "key_position", "head_size", queries, wide, wide)
    with raises_message(ConfigError):
        dot_product_attention("position", "key_position", "head_size", x, y, y, heads=(), strategy="ulysses")
    with raises_message(ConfigError):
        dot_product_attention("position", "key_position", "head_size", x, y, y, heads="kv_heads")
    with jax.set_mesh(mesh), raises_message(ConfigError):
        many = jax.ShapeDtypeStruct((2**16, 2**16, 128), jnp.bfloat16)
        q, k = (
            hax.NamedArray(many, hax.make_axes(**{"kv_head": 2**16, name: 2**16, "head_size": 128}))
            for name in ("position", "key_position")
        )
        dot_product_attention("position", "key_position", "head_size", q, k, k, axis_mapping=mapping, hardware="v5e-4")
    with raises_message(ConfigError):
        names = "position", "key_position", "head_size"
        jax.jit(lambda scale: dot_product_attention(*names, x, y, y, scaling_factor=scale).array)(0.1)
