"""Sequences in the order of a layout: a model's losses are those of the unsharded sequence, for every layout."""

from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.models.loss import maybe_fused_next_token_loss
from levanter.models.mixtral import MixtralConfig

from shardplan.attention import Method, next_token_losses, restore_order, shard_sequence, with_sequence_parallel
from shardplan.errors import ConfigError
from shardplan.positions.sequence_layout import SequenceLayout

LENGTH, VOCAB = 61, 40
DOCUMENTS = (23, 7, 31)


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(max_seq_len=64, hidden_dim=48, intermediate_dim=64, num_layers=2, num_heads=6, num_kv_heads=2,
        scan_layers=True, attn_backend=AttentionBackend.VANILLA,
    )  # fmt: skip
    return config.build(hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))


@pytest.fixture(scope="module", params=["one document", "documents"])
def example(request):
    tokens = hax.named(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32), ("batch", "position"))
    mask = AttentionMask.causal()
    if request.param == "documents":
        labels = np.repeat(np.arange(3), DOCUMENTS).astype(np.int32)
        mask = mask.with_segment_ids(hax.named(jnp.asarray(labels), "position"))
    loss_mask = hax.named(jnp.asarray(np.random.default_rng(1).random((2, LENGTH)) < 0.9), ("batch", "position"))
    return LmExample(tokens, loss_mask.astype(jnp.float32), mask)


@pytest.fixture(scope="module")
def expected(model, example):
    """Losses by Levanter's own model and loss function, on one device."""

    @hax.named_jit
    def losses(model, example):
        stream = model.activations(example.tokens, example.attn_mask)
        return maybe_fused_next_token_loss(
            hax.Axis("position", LENGTH), model.Embed, model.Vocab, stream, model.get_lm_head(),
            example.tokens, example.loss_weight, reduction=None,
        )  # fmt: skip

    return losses(model, example)


def example_documents(example, kind):
    """Lengths that are known while tracing, for the layout `documents`."""
    return DOCUMENTS if kind == "documents" and example.attn_mask.segment_ids is not None else None


@pytest.mark.parametrize(
    ("strategy", "ulysses", "kind"),
    [("ring", 1, "zigzag"), ("ring", 1, "documents"), ("hybrid", 2, "contiguous"), ("all_gather", 1, "striped")],
)
def test_losses_are_those_of_the_unsharded_sequence(model, example, expected, strategy, ulysses, kind):
    """The number of devices does not divide the length, so that there is padding."""
    layout = SequenceLayout(LENGTH, 4 // ulysses, ulysses, kind, example_documents(example, kind))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    parallel = with_sequence_parallel(model, Method(strategy, ulysses, layout=layout))
    sequence = shard_sequence(example, layout)
    assert sequence.tokens.axis_size("position") == layout.padded_length > LENGTH
    with jax.set_mesh(mesh), hax.axis_mapping({"position": "model"}):
        losses = hax.named_jit(next_token_losses)(parallel, hax.shard(sequence))
    losses = restore_order(losses, sequence)
    np.testing.assert_allclose(losses.array, expected.rearrange(losses.axes).array, rtol=1e-6, atol=1e-6)
    assert float(losses.sum().array / example.loss_weight.sum().array) == pytest.approx(
        float(expected.sum().array / example.loss_weight.sum().array), abs=1e-6
    )


def test_targets_are_shifted_before_reordering(example):
    """Shifted afterwards, every shard would lose a target, or take that of another shard."""
    layout = SequenceLayout(LENGTH, 4, 1, "zigzag")
    sequence = shard_sequence(example, layout)
    tokens, targets = restore_order(sequence.tokens, sequence), restore_order(sequence.targets, sequence)
    assert (tokens.array == example.tokens.array).all()
    assert (targets.array[:, :-1] == example.tokens.array[:, 1:]).all()
    assert not sequence.loss_mask.array[:, layout.positions() == LENGTH - 1].any()


def test_positions_are_the_last_axis_of_tokens(example):
    """Whatever its name is: renamed, an example is reordered in the same way; explicit masks along keys, too."""
    layout = SequenceLayout(LENGTH, 4, 1, "zigzag")
    allowed = hax.named(np.tri(LENGTH, dtype=bool), ("position", "key_position"))
    example = replace(example, attn_mask=AttentionMask.explicit(allowed))
    names = {"position": "batch", "batch": "position", "key_position": "embed"}

    def renamed(x):
        return x.rename({axis.name: names[axis.name] for axis in x.axes})

    is_named = lambda leaf: isinstance(leaf, hax.NamedArray)  # noqa: E731
    sequence, other = (
        shard_sequence(example, layout),
        shard_sequence(jax.tree.map(renamed, example, is_leaf=is_named), layout),
    )
    assert (sequence.position, other.position) == ("position", "batch")
    for one, two in zip(*(jax.tree.leaves(each, is_leaf=is_named) for each in (sequence, other)), strict=True):
        assert renamed(one).axes == two.axes and (one.array == two.array).all()
    order = np.maximum(layout.positions(), 0)
    assert (sequence.mask.explicit_mask.array == allowed.array[order][:, order]).all()
    by_head = hax.named(np.arange(2 * LENGTH).reshape(2, LENGTH) % 3 > 0, ("kv_head", "position"))
    sequence = shard_sequence(replace(example, attn_mask=AttentionMask.explicit(by_head)), layout)
    assert (sequence.mask.explicit_mask.array == by_head.array[:, order]).all()  # heads are no key positions


@pytest.mark.quick
def test_a_layout_of_another_length_is_refused(example, raises_message):
    with raises_message(ConfigError):
        shard_sequence(example, SequenceLayout(60, 4))


@pytest.mark.parametrize("example", ["documents"], indirect=True)
def test_a_layout_of_other_documents_is_refused(example, raises_message):
    with raises_message(ConfigError):
        shard_sequence(example, SequenceLayout(LENGTH, 4, 1, "documents", (30, 31)))


def test_masks_that_levanter_accepts(example, raises_message):
    """No mask, and segment ids of keys with their own axis name."""
    layout = SequenceLayout(LENGTH, 4, 1, "zigzag")
    assert shard_sequence(replace(example, attn_mask=None), layout).mask == AttentionMask()
    if example.attn_mask.segment_ids is None:
        return
    ids = example.attn_mask.segment_ids[0]
    mask = AttentionMask.causal().with_segment_ids(ids, ids.rename({"position": "key_position"}))
    segments = shard_sequence(replace(example, attn_mask=mask), layout).mask.segment_ids
    for each, name in zip(segments, ("position", "key_position"), strict=True):
        assert (each.array == ids.array[np.maximum(layout.positions(), 0)]).all() and each.axes[0].name == name
    with raises_message(ConfigError):
        jax.jit(lambda e: shard_sequence(e, SequenceLayout(LENGTH, 4, 1, "documents", DOCUMENTS)).tokens.array)(example)


@pytest.mark.parametrize("example", ["one document"], indirect=True)
def test_sequences_in_another_order_are_refused(model, example, raises_message):
    """Attention without a layout, and Levanter's own, expects the order of the sequence."""
    sequence, striped = (shard_sequence(example, SequenceLayout(LENGTH, 4, 1, kind)) for kind in ("zigzag", "striped"))
    for method, given in (
        (Method("ring", layout=sequence.layout), striped),
        (Method("ring"), sequence),
        (None, striped),
    ):
        parallel = model if method is None else with_sequence_parallel(model, method)
        with raises_message(ConfigError):
            next_token_losses(parallel, given)
    documents = SequenceLayout(LENGTH, 4, 1, "zigzag", DOCUMENTS)
    with raises_message(ConfigError):
        next_token_losses(with_sequence_parallel(model, Method("ring", layout=documents)), sequence)


@pytest.mark.parametrize("example", ["one document"], indirect=True)
@pytest.mark.parametrize("kind", [pytest.param(LlamaConfig, marks=pytest.mark.whole), MixtralConfig])
def test_examples_in_sequence_order_are_refused(example, kind, raises_message):
    """A model whose attention expects another order would return wrong losses silently. Its method can be replaced."""
    config = kind(max_seq_len=LENGTH, hidden_dim=32, intermediate_dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
        attn_backend=AttentionBackend.VANILLA,
    )  # fmt: skip
    model = config.build(hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))
    zigzag, ring = (SequenceLayout(LENGTH, 4, 1, kind) for kind in ("zigzag", "contiguous"))
    parallel = with_sequence_parallel(model, Method("ring", layout=zigzag))
    with raises_message(ConfigError):
        parallel.compute_next_token_loss(example, reduction=None)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        # Levanter's own attention; Levanter's loss of Mixtral includes the router's auxiliary loss
        expected = jax.jit(next_token_losses)(model, shard_sequence(example, SequenceLayout(LENGTH)))
    for layout in (zigzag, ring):
        parallel = with_sequence_parallel(parallel, Method("ring", layout=layout))
        sequence = shard_sequence(example, layout)
        with jax.set_mesh(mesh), hax.axis_mapping({"position": "model"}):
            losses = restore_order(hax.named_jit(next_token_losses)(parallel, sequence), sequence)
        np.testing.assert_allclose(losses.array, expected.rearrange(losses.axes).array, atol=1e-5)
