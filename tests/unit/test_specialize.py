"""The attention that a plan runs: the splash kernel only if every device can compute its part alone."""

import dataclasses

import pytest
from haliax.nn.scan import ScanCheckpointPolicy

from shardplan.errors import ConfigError
from shardplan.execution import specialize
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan


@pytest.fixture(scope="module")
def model():
    hf_config = {**read_config("llama-3.1-8b", None), "num_hidden_layers": 2}
    return build_model(hf_config, 1024)


@pytest.mark.parametrize(
    ("slice_name", "position", "mapping", "backend"),
    [
        ("v4-16", 1024, {"kv_head": ["model"]}, "splash"),
        ("v4-16", 1024, {}, "splash"),
        ("cpu-8", 1024, {"kv_head": ["model"]}, "jax_flash"),  # splash needs a TPU
        ("v4-16", 1000, {"kv_head": ["model"]}, "jax_flash"),  # not a multiple of 128
        ("v4-16", 640, {"kv_head": ["model"]}, "jax_flash"),  # not a multiple of the kernel's block of 512
        ("v4-16", 256, {"kv_head": ["model"]}, "splash"),  # one block
        ("v4-16", 1024, {"position": ["model"]}, "jax_flash"),  # a causal mask would start again on every device
        ("v4-16", 1024, {"head_size": ["model"]}, "jax_flash"),  # scores would be partial sums
        (
            "v4-16",
            1024,
            {"q_heads_per_group": ["model"]},
            "jax_flash",
        ),  # queries paired with other groups' keys
    ],
)
def test_attention_backend(model, make_config, slice_name, position, mapping, backend):
    config = make_config(
        model_config="llama-3.1-8b",
        hardware_slice=slice_name,
        workload_position=position,
        workload_batch=8,
    )
    devices = parse_slice(slice_name).devices
    plan = plan_given_mappings(config, model, {"replica": 1, "data": devices // 4, "model": 4}, mapping, {})
    special = specialize(model, plan)
    assert special.config.attn_backend.value == backend
    attention = special.template.transformer.layers.stacked.self_attn.config
    assert attention.attn_backend.value == backend
    # the kernel's own block, whatever the model's configuration requests
    assert attention.flash_attention_block_size == (512 if backend == "splash" else None)


def test_edited_plan_with_an_impossible_kernel(model, make_config):
    config = make_config(model_config="llama-3.1-8b", hardware_slice="v4-16", workload_position=1024)
    plan = plan_given_mappings(config, model, {"replica": 1, "data": 2, "model": 4}, {"kv_head": ["model"]}, {})
    assert plan.attention.kernel == "splash"
    edited = dataclasses.replace(plan, compute_mapping={"position": ["model"]})
    with pytest.raises(
        ConfigError, match=r"attention\.kernel is splash, which cannot compute attention as .* shard it"
    ):
        specialize(model, edited)


@pytest.mark.parametrize("name", ["default", "nested", "offload", "recompute", "save_all"])
def test_gradient_checkpointing(model, make_config, name):
    config = make_config(
        model_config="llama-3.1-8b",
        hardware_slice="v5p-16",
        workload_kind="train",
        workload_gradient_checkpointing=name,
    )
    special = specialize(model, make_plan(config, model))
    assert special.config.gradient_checkpointing == (True if name == "default" else name)
    # the layers have it too: Haliax stores a policy in each of them
    policy = ScanCheckpointPolicy.from_bool_or_str(special.config.gradient_checkpointing)
    assert special.template.transformer.layers.gradient_checkpointing == policy
