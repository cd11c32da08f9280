"""The attention that a plan runs: the splash kernel only if every device can compute its part alone.

Attention of Levanter's classes is computed by the kernel of their configuration, which `specialize` sets. That of the
decoder is computed by shardplan within `planned_attention`, by the kernel of the plan; its configuration has the same
one, for calls outside of a plan.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax.nn.scan import ScanCheckpointPolicy

from shardplan.errors import ConfigError
from shardplan.execution import planned_attention, specialize
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan


@pytest.fixture(scope="module", params=["decoder", pytest.param(LEVANTER, marks=[pytest.mark.whole])])
def model(request):
    model_class = LEVANTER if request.param == LEVANTER else None
    return build_model({**read_config("llama-3.1-8b", None, model_class), "num_hidden_layers": 2}, 1024)


@pytest.mark.slow
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
    if model.is_decoder and position == 640:
        backend = "splash"  # shardplan's kernel, which takes any multiple of 128
    assert plan.attention.kernel == {"splash": "splash", "jax_flash": "blockwise"}[backend]
    special = specialize(model, plan)
    assert special.config.attn_backend.value == backend
    template = special.template
    attention = template.config if model.is_decoder else template.transformer.layers.stacked.self_attn.config
    assert attention.attn_backend.value == backend
    # the kernel's own block, whatever the model's configuration requests
    assert attention.flash_attention_block_size == (512 if backend == "splash" else None)


@pytest.mark.parametrize(("slice_name", "kernel"), [("v4-16", "splash"), ("cpu-8", "blockwise")])
def test_kernel_of_the_decoder_is_that_of_the_plan(monkeypatch, make_config, slice_name, kernel):
    """Every call of attention gets the kernel of the plan in place of the one of the configuration."""
    model = build_model({**read_config("llama-3.1-8b", None), "num_hidden_layers": 2}, 1024)
    config = make_config(
        model_config="llama-3.1-8b", hardware_slice=slice_name, workload_position=1024, workload_batch=8
    )
    mesh = {"replica": 1, "data": parse_slice(slice_name).devices // 4, "model": 4}
    plan = plan_given_mappings(config, model, mesh, {"kv_head": ["model"]}, {})
    calls = []

    def attend(**arguments):
        calls.append(arguments)
        return arguments["query"]

    monkeypatch.setattr(planned_attention, "sharded_attention", attend)
    special = specialize(model, plan)
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    with planned_attention.planned_attention(special, plan):
        eqx.filter_eval_shape(
            lambda module, tokens: module.activations(hax.named(tokens, ("batch", "position"))),
            special.template,
            tokens,
        )
    assert calls and {arguments["kernel"] for arguments in calls} == {plan.attention.kernel} == {kernel}
    assert not any({"attn_backend", "flash_block_size"} & arguments.keys() for arguments in calls)


def test_edited_plan_with_an_impossible_kernel(model, make_config, raises_message):
    config = make_config(model_config="llama-3.1-8b", hardware_slice="v4-16", workload_position=1024)
    plan = plan_given_mappings(config, model, {"replica": 1, "data": 2, "model": 4}, {"kv_head": ["model"]}, {})
    assert plan.attention.kernel == "splash"
    edited = dataclasses.replace(plan, compute_mapping={"position": ["model"]})
    with raises_message(ConfigError):
        specialize(model, edited)


@pytest.mark.slow
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
    template = special.template
    [layers] = template.segments if model.is_decoder else [template.transformer.layers]
    assert layers.gradient_checkpointing == policy
