"""The `model` section of a Levanter configuration whose model is a decoder."""

import dataclasses
import json

import draccus
import jax
import pytest
from conftest import ROOT
from haliax import Axis, NamedArray
from haliax.nn.scan import ScanCheckpointPolicy
from levanter.compat.hf_checkpoints import HFCompatConfig
from levanter.main.eval_lm import EvalLmConfig
from levanter.main.train_lm import TrainLmConfig
from levanter.utils.jax_utils import leaf_key_paths

from shardplan import HFCheckpointConverter
from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.section import DecoderSection
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import abstract_module
from shardplan.model.section_model import build_section_model

CHECKPOINT = str(ROOT / "tests" / "golden" / "families" / "gemma3_text")
MIXTURE = str(ROOT / "tests" / "golden" / "families" / "qwen3_moe")
KEYS = json.loads((ROOT / "tests" / "golden" / "families" / "gpt_neox" / "config.json").read_text())


def decode(program=TrainLmConfig, **section):
    return draccus.decode(program, {"model": {"type": "shardplan_decoder", **section}}).model


@pytest.mark.parametrize("program", [TrainLmConfig, EvalLmConfig])
def test_a_section_that_names_a_checkpoint_is_its_configuration(program):
    config = decode(program, reference_checkpoint=CHECKPOINT)
    expected = DecoderConfig.from_hf_config(read_config(f"{CHECKPOINT}/config.json", None))
    assert config == dataclasses.replace(expected, reference_checkpoint=CHECKPOINT)


def test_a_section_of_keys_or_of_a_bundled_model():
    assert decode(hf_config=KEYS).segments == DecoderConfig.from_hf_config(KEYS).segments
    assert decode(hf_config="pythia-12b").segments[0].repeats == 36
    images = json.loads((ROOT / "tests" / "golden" / "families" / "gemma3" / "config.json").read_text())
    assert decode(hf_config=images).family == "gemma3_text"


def test_what_levanter_logs_is_the_same_section():
    policy = {"save_carries": "offload", "save_block_internals": ["attn_out"]}
    settings = {"max_seq_len": 32, "attn_backend": "vanilla", "gradient_checkpointing": policy}
    config = decode(reference_checkpoint=CHECKPOINT, **settings)
    assert config.gradient_checkpointing == ScanCheckpointPolicy("offload", save_block_internals=["attn_out"])
    logged = draccus.encode(TrainLmConfig(model=config))["model"]
    assert json.loads(json.dumps(logged)) == logged
    assert draccus.decode(TrainLmConfig, {"model": logged}).model == config


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({}, "model: a shardplan_decoder needs reference_checkpoint, a Hugging Face checkpoint, or hf_config"),
        ({"reference_checkpoint": CHECKPOINT, "max_seq_len": 65}, "is 65, and the model has 64 positions; use at most"),
        ({"reference_checkpoint": CHECKPOINT, "hidden_dim": 8}, "`hidden_dim` are not valid for DecoderSection"),
        (
            {"hf_config": {"vocab_size": 8}},
            "model.hf_config has no model_type; give the keys",
        ),
        ({"hf_config": {"model_type": "gptneox"}}, "model_type 'gptneox' is not supported; did you mean 'gpt_neox'"),
        ({"hf_config": {**KEYS, "alibi": True}}, "alibi True: a 'gpt_neox' has no such key"),
        (
            {"hf_config": KEYS, "expert_statistics": True},
            "is true, and a gpt_neox of this config.json has no routed experts; leave it out",
        ),
    ],
)
def test_what_cannot_work_is_refused(section, problem):
    with pytest.raises(draccus.utils.DecodingError, match=problem):
        decode(**section)


def test_weights_without_a_checkpoint_are_refused(raises_message):
    """As `initialize_from_hf: true` asks for, of a section that names none."""
    converter = decode(hf_config=KEYS).hf_checkpoint_converter()
    with raises_message(ConfigError):
        HFCheckpointConverter.load_pretrained(converter, None)


def test_levanter_finds_its_own_models_beside_it():
    """`HFCheckpointConverter.from_hf` makes each class of this kind without arguments."""
    assert not issubclass(DecoderSection, HFCompatConfig)


def test_the_lint_builds_the_model_of_a_section():
    model = build_section_model({"type": "shardplan_decoder", "hf_config": KEYS}, 80, 32)
    assert (model.type, model.vocab.size, model.positions, model.is_decoder) == ("gpt_neox", 80, 64, True)


def test_levanter_names_every_parameter_of_experts():
    """Its checkpoints have a tree of names with the structure of the model."""
    config = decode(reference_checkpoint=MIXTURE, expert_statistics=True)
    module = abstract_module(config, Axis("vocab", 72))
    assert config.expert_statistics and draccus.encode(config)["expert_statistics"]
    names = leaf_key_paths(module, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    assert jax.tree.structure(names) == jax.tree.structure(module, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    assert "segments.0.stacked.layers.0.mlp.experts.gate" in jax.tree.leaves(names)
