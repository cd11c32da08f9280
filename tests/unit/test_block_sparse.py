"""Arguments of attention to given blocks: axes in any order, dtypes, and what is refused."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from shardplan.attention import attend_to_blocks
from shardplan.errors import ConfigError

Batch, Pos, KVHead, QHead, HeadSize, Selected = hax.make_axes(
    batch=2, position=20, kv_head=2, q_heads_per_group=3, head_size=4, selected=2
)
RNG = np.random.default_rng(0)


def random(*axes):
    return hax.named(RNG.normal(size=[axis.size for axis in axes]).astype(np.float32), axes)


ARRAYS = {
    "queries": random(Batch, Pos, KVHead, QHead, HeadSize),
    "keys": random(Batch, Pos, KVHead, HeadSize),
    "values": random(Batch, Pos, KVHead, HeadSize),
    "blocks": (hax.arange(Pos) // 8 - hax.arange(Selected).broadcast_axis(Pos)).broadcast_axis((Batch, KVHead)),
}


def test_axes_are_in_any_order():
    """The result has the axes of queries, then the head size of values; bfloat16 gives bfloat16."""
    expected = attend_to_blocks(**ARRAYS, block_size=8)
    assert expected.axes == (Batch, Pos, KVHead, QHead, HeadSize)
    turned = {name: x.rearrange(tuple(reversed(x.axes))) for name, x in ARRAYS.items()}
    turned["values"] = turned["values"].rename({"head_size": "value"})
    output = attend_to_blocks(**turned, block_size=8)
    assert output.axes == (QHead, KVHead, Pos, Batch, Axis("value", 4))
    np.testing.assert_allclose(output.rearrange((Batch, Pos, KVHead, QHead, "value")).array, expected.array, atol=1e-6)
    narrow = {name: x if name == "blocks" else x.astype(jnp.bfloat16) for name, x in ARRAYS.items()}
    assert attend_to_blocks(**narrow, block_size=8).dtype == jnp.bfloat16


def test_one_sequence_without_a_batch_axis():
    output = attend_to_blocks(**{name: x["batch", 1] for name, x in ARRAYS.items()}, block_size=8)
    assert output.axes == (Pos, KVHead, QHead, HeadSize)
    np.testing.assert_allclose(output.array, attend_to_blocks(**ARRAYS, block_size=8)["batch", 1].array, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "kernels"}, "method is 'kernels'; did you mean 'kernel'?"),
        ({"layout": "zig-zag"}, "layout is 'zig-zag'; did you mean 'zigzag'?"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"block_size": 12, "method": "kernel"}, "block_size is 12; kernels copy blocks of a multiple of 8 tokens: use "
         "16, or another method"),
        ({"blocks": ARRAYS["blocks"].astype(float)}, "blocks are float32; pass their numbers, int32"),
        ({"queries": ARRAYS["queries"].rename({"q_heads_per_group": "head"})}, "queries are batch: 2, position: 20, "
         "kv_head: 2, head: 3, head_size: 4; they must have the axes batch, position, kv_head, q_heads_per_group, "
         "head_size"),
        ({"keys": ARRAYS["keys"]["position", :16]}, "keys are batch: 2, position: 16, kv_head: 2, head_size: 4; they "
         "must have the axes batch: 2, position: 20, kv_head: 2, head_size: 4"),
        ({"values": ARRAYS["values"]["batch", 0]}, "values are position: 20, kv_head: 2, head_size: 4; they must have "
         "the axes batch: 2, position: 20, kv_head: 2, and one axis more"),
        ({"blocks": ARRAYS["blocks"]["selected", 0]}, "blocks are batch: 2, kv_head: 2, position: 20; they must have "
         "the axes batch: 2, position: 20, kv_head: 2, and one axis more"),
    ],
)  # fmt: skip
def test_refused(changes, message):
    with pytest.raises(ConfigError) as raised:
        attend_to_blocks(**({"block_size": 8} | ARRAYS | changes))
    assert str(raised.value) == f"attend_to_blocks: {message}"
