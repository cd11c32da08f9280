"""The model section of a Levanter configuration: positions, attention backend and gradient checkpointing."""

import pytest

from shardplan.errors import ConfigError
from shardplan.levanter_config.model_section import ModelSection, parse_model_section


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, ModelSection()),
        ({"type": "llama", "seq_len": 1024}, ModelSection(position=1024)),
        ({"max_seq_len": 512, "attn_backend": "jax_flash"}, ModelSection(position=512, attention_backend="jax_flash")),
        ({"gradient_checkpointing": True}, ModelSection("default")),
        ({"gradient_checkpointing": False}, ModelSection("save_all")),
        ({"gradient_checkpointing": "full"}, ModelSection("recompute")),
        ({"gradient_checkpointing": "nested"}, ModelSection("nested")),
        ({"gradient_checkpointing": {"nested": 4}}, ModelSection("nested:4")),
        ({"gradient_checkpointing": {"nested": 4, "simple": True}}, ModelSection("nested:4")),
        ({"gradient_checkpointing": {"save_carries": "offload"}}, ModelSection("offload_carries")),
        ({"gradient_checkpointing": {"save_carries": "offload", "save_inputs": "offload"}}, ModelSection("offload")),
        ({"gradient_checkpointing": {"save_carries": False}}, ModelSection("recompute")),
        ({"gradient_checkpointing": {"save_block_internals": True}}, ModelSection("save_all")),
        ({"gradient_checkpointing": {"simple": True}}, ModelSection("default")),
        (None, ModelSection()),
        ("llama", ModelSection()),
    ],
    ids=str,
)
def test_model_section(model, expected):
    assert parse_model_section({"model": model}) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"gradient_checkpointing": "ofload"},
            "model.gradient_checkpointing is 'ofload'; did you mean 'offload'? (or true, or false)",
        ),
        ({"gradient_checkpointing": {"nested": 0}}, "model.gradient_checkpointing.nested is 0; it must be true, false"),
        ({"gradient_checkpointing": {"nested": "a"}}, "model.gradient_checkpointing.nested is 'a'; it must be true"),
        ({"gradient_checkpointing": [1]}, "model.gradient_checkpointing is [1]; valid: full, nested, offload, "),
        ({"seq_len": "4k"}, "model.seq_len is '4k'; it must be a positive integer"),
    ],
)
def test_model_section_errors(model, message):
    with pytest.raises(ConfigError) as raised:
        parse_model_section({"model": model})
    assert str(raised.value).startswith(message)
