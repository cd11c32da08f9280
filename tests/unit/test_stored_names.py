"""Names of stored tensors: prefixes, wrappers and heads, and which of those that a model lacks change it."""

from types import SimpleNamespace

import pytest

from shardplan.checkpoint.mapping.names import find_stored_names
from shardplan.checkpoint.mapping.unneeded import classify_unexpected, kinds_text
from shardplan.errors import CheckpointError

EXPECTED = {
    "model.embed_tokens.weight": (8, 4),
    **{f"model.layers.{i}.self_attn.q_proj.weight": (4, 4) for i in (0, 1)},
    **{f"model.layers.{i}.norm.weight": (4,) for i in (0, 1)},
    "model.norm.weight": (4,),
    "lm_head.weight": (8, 4),
}
"""Tensors of a small model, as Llama names them."""


def stored(rename=lambda name: name, **more):
    """Name -> tensor, of all expected ones under other names, and of `more` names with __ for a dot."""
    shapes = {rename(name): shape for name, shape in EXPECTED.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    return {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"_forward_module._orig_mod.module.{name}",
        lambda name: f"language_model.{name}",
        lambda name: name.removeprefix("model."),
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: name.replace("model.", "language_model.", 1),
        lambda name: name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."),
        lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn._orig_mod."),
    ],
)
def test_names_of_every_wrapper(rename):
    """Beside a vision tower whose names end alike, and a copy of all weights that is not the model."""
    tower = {f"vision__model__layers__{i}__self_attn__q_proj__weight": (3, 3) for i in range(9)}
    found = find_stored_names(EXPECTED, stored(rename, **tower), "ck")
    assert found.names == {name: rename(name) for name in EXPECTED}
    assert found.head == rename("lm_head.weight")
    assert [found.canonical[rename(name)] for name in EXPECTED] == [*EXPECTED]


def test_a_model_without_a_module_around_all():
    """As GPT-2, which is saved with and without `transformer.`; its head is outside."""
    expected = {"wte.weight": (8, 4), "h.0.ln_1.weight": (4,), "ln_f.weight": (4,)}
    for prefix in ("", "transformer.", "_orig_mod.transformer."):
        tensors = {prefix + name: SimpleNamespace(shape=shape) for name, shape in expected.items()}
        head = "lm_head.weight" if prefix == "transformer." else None
        if head:
            tensors[head] = SimpleNamespace(shape=(8, 4))
        found = find_stored_names(expected, tensors, "ck")
        assert found.names == {name: prefix + name for name in expected} and found.head == head


@pytest.mark.parametrize("prefix", ["gpt_neox.", "", "module.gpt_neox.", "_orig_mod.gpt_neox."])
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_head_of_another_name(prefix, is_tied):
    """As GPT-NeoX, saved with and without `gpt_neox.`; a tied model may have a copy of its embedding for a head."""
    expected = {"gpt_neox.embed_in.weight": (8, 4), "gpt_neox.layers.0.attention.dense.weight": (4, 4)}
    body = {prefix + name.removeprefix("gpt_neox."): name for name in expected}
    head = prefix.removesuffix("gpt_neox.") + "embed_out.weight"
    tensors = {name: SimpleNamespace(shape=expected[own]) for name, own in body.items()}
    tensors[head] = SimpleNamespace(shape=(8, 4))
    if not is_tied:
        expected["embed_out.weight"] = (8, 4)
        body[head] = "embed_out.weight"
    found = find_stored_names(expected, tensors, "ck")
    assert found.names == {own: name for name, own in body.items()}
    assert (found.head, found.canonical[head]) == (head, "embed_out.weight")


def test_missing_tensors_have_the_prefix_of_the_others():
    tensors = stored(lambda name: f"module.{name}")
    del tensors["module.model.norm.weight"]
    found = find_stored_names(EXPECTED, tensors, "ck")
    assert "model.norm.weight" not in found.names
    assert found.prefixed["model.norm.weight"] == "module.model.norm.weight"


def test_two_sets_of_weights_are_refused(raises_message):
    tensors = {**stored(lambda name: f"student.{name}"), **stored(lambda name: f"teacher.{name}")}
    with raises_message(CheckpointError):
        find_stored_names(EXPECTED, tensors, "ck")
    # the names that the model gives win
    assert find_stored_names(EXPECTED, {**stored(), **tensors}, "ck").names == {name: name for name in EXPECTED}
    tensors = {**stored(), **stored(lambda name: f"_orig_mod.{name}")}
    with raises_message(CheckpointError):
        find_stored_names(EXPECTED, tensors, "ck")


@pytest.mark.parametrize(
    ("name", "is_foreign"),
    [
        ("mtp.fc.weight", False),
        ("vision_tower.layers.0.self_attn.q_proj.weight", False),
        ("v_head.summary.bias", False),
        ("model.layers.1.self_attn.k_scale", False),
        ("model.layers.1.self_attn.q_proj._extra_state", False),
        ("model.layers.2.eh_proj.weight", False),
        ("model.layers.1.self_attn.q_proj.bias", True),
        ("model.layers.1.self_attn.q_norm.weight", True),
        ("model.norm.bias", True),
        ("lm_head.bias", True),
        ("model.layers.2.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.qweight", True),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", True),
    ],
)
def test_tensors_that_change_a_model_and_those_that_do_not(name, is_foreign):
    found = classify_unexpected([name], EXPECTED)
    assert (found.foreign, found.unneeded) == (((name,), ()) if is_foreign else ((), (name,)))


def test_a_further_block_with_tensors_of_its_own_is_no_block_of_the_model():
    """Such as the layer with which DeepSeek and GLM predict the token after the next."""
    names = ["model.layers.2.self_attn.q_proj.weight", "model.layers.2.eh_proj.weight"]
    assert classify_unexpected(names, EXPECTED).unneeded == tuple(sorted(names))
    assert classify_unexpected(names[:1], EXPECTED).advice == "it has more layers than its config.json says"


def test_constants_are_ignored_without_a_word():
    assert not classify_unexpected(["model.layers.0.self_attn.rotary_emb.inv_freq"], EXPECTED).unneeded


def test_kinds():
    names = [f"vision.blocks.{i}.{part}.weight" for i in range(3) for part in "abcdefgh"]
    assert kinds_text([*names, "mtp.fc.weight"]) == "24 x vision.blocks.N.*, mtp.fc.weight"
    assert kinds_text(["model.layers.7.k_scale"]) == "model.layers.7.k_scale"
    assert kinds_text(list("abcdefgh")) == "a, b, c, d, e, f, and 2 more kinds"
