"""Streamed with a planned sharding, every model has the same logits as in transformers."""

import dataclasses
import itertools

import haliax as hax
import jax
import numpy as np
import pytest
from conftest import MODEL_TYPES, program_of
from levanter.layers.attention import AttentionConfig, AttentionWithSink

from shardplan.attention.levanter import Method, with_sequence_parallel
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.errors import ConfigError
from shardplan.execution import Program, specialize
from shardplan.execution.layout_forward import planned_forward
from shardplan.execution.planned_attention import planned_attention
from shardplan.execution.planned_experts import planned_experts
from shardplan.experts.planned_model import with_planned_experts
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.mapping import as_tuples
from shardplan.runtime.devices import arrange
from shardplan.search.make_plan import make_plan
from shardplan.steps.forward import cast_for_compute, compute_logits
from shardplan.storage import open_adapter, open_folder

TOLERANCE = 2e-5
MESHES = [(1, 4, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1)]


def run(
    golden,
    make_config,
    name,
    mesh,
    compute,
    change_model=None,
    change_plan=None,
    attention=None,
    experts=None,
    plans_experts=False,
    **workload,
):
    """Stream a model as planned on `mesh` (replica, data, model), and call `compute` with it.

    Args:
        compute: takes the module, its model, the plan, the device mesh and the tokens.
        plans_experts: whether shardplan's blocks compute the experts of Levanter's class, as in commands.
        workload: further keys of the configuration.

    Returns:
        The result of `compute`, and the logits of transformers.
    """
    reference = np.load(golden / name / "golden.npz")
    tokens = np.tile(reference["tokens"], (4, 1))  # 8 sequences, so that every mesh divides the batch
    config = make_config(
        model_ref=golden / name,
        workload_batch=len(tokens),
        workload_position=tokens.shape[1],
        workload_param_dtype="float32",
        workload_compute_dtype="float32",
        mesh_replica=mesh[0],
        mesh_data=mesh[1],
        mesh_model=mesh[2],
        **workload,
    )
    folder = open_folder(config.model.ref)
    hf_config = read_config(None, folder, config.model_class, config.load.keep_dtype)
    model = build_model(hf_config, config.workload.position)
    model = with_planned_experts(model) if plans_experts else model
    model = dataclasses.replace(model, **(change_model or {}))
    plan = make_plan(config, model)
    plan = dataclasses.replace(
        plan,
        compute_mapping={**plan.compute_mapping, **(change_plan or {})},
        attention=attention or plan.attention,
        experts=experts or plan.experts,
    )
    model = specialize(model, plan)
    device_mesh = arrange(jax.devices()[: np.prod(mesh)], parse_slice(plan.hardware.slice), plan.mesh)
    module, _ = stream_checkpoint(
        model.template,
        folder,
        device_mesh,
        plan.param_mapping,
        plan.workload.param_dtype,
        adapter=open_adapter(config.model.adapter),
    )
    expected = np.tile(reference["logits" if "logits" in reference else "logits_float64"], (4, 1, 1))
    assert np.abs(expected).max() > 1  # or else the comparison would be meaningless
    return compute(module, model, plan, device_mesh, tokens), expected


def forward_logits(module, model, plan, mesh, tokens):
    """float32[batch, position, vocab] logits of int32[batch, position] `tokens`."""
    arguments = program_of("prefill", model, plan, mesh).arguments
    forward = planned_forward(plan)

    def all_logits(module, tokens):
        mapping = as_tuples(plan.compute_mapping)
        with hax.axis_mapping(mapping), planned_attention(model, plan), planned_experts(plan):
            module = cast_for_compute(module, plan.workload.compute_dtype)
            return compute_logits(model, module, forward.activations(model, module, tokens, None))

    program = Program("logits", all_logits, arguments, mesh)
    like = arguments[1]
    array = jax.make_array_from_callback(tokens.shape, like.array.sharding, lambda index: tokens[index])
    logits = program.compile(plan.compiler_options)(module, hax.named(array, like.axes))
    return np.asarray(logits.rearrange((*like.axes, model.vocab)).array)


def deviation(*arguments, **changes) -> float:
    """Largest difference between the logits on a mesh and those of transformers; see `run`."""
    logits, expected = run(*arguments, forward_logits, **changes)
    return np.abs(logits - expected).max()


CLASSES = (None, LEVANTER)
"""The decoder, which evaluates all models, and Levanter's classes, for its scripts and for training."""


def is_quick(type_index, mesh_index, model_class):
    """Whether a case is in every run: each type by the decoder, and each third by Levanter's class."""
    return mesh_index == type_index % len(MESHES) and (model_class is None or type_index % 3 == 0)


@pytest.mark.parametrize(
    ("name", "mesh", "model_class"),
    [
        pytest.param(name, mesh, model_class, marks=[] if is_quick(i, j, model_class) else [pytest.mark.whole])
        for (i, name), (j, mesh), model_class in itertools.product(enumerate(MODEL_TYPES), enumerate(MESHES), CLASSES)
    ],
)
def test_logits_equal_transformers(golden, make_config, name, mesh, model_class):
    assert deviation(golden, make_config, name, mesh, model_levanter_class=model_class) <= TOLERANCE


def test_gemma2_needs_the_soft_cap_that_levanter_leaves_out(golden, make_config):
    """Without the final soft cap the logits are as far off as those of Levanter's own model: 4e-3 to 8e-3."""
    assert 4e-3 < deviation(golden, make_config, "gemma2", (1, 4, 2), change_model={"logit_soft_cap": None}) < 8e-3


def test_mapping_the_token_axes_of_experts_gives_wrong_logits(golden, make_config):
    """Levanter's mixture of experts is wrong if its token axes are mapped, so no plan may map them."""
    sharded = {"token": ["data"], "token_repeat": ["data"]}
    changes = {"change_plan": sharded, "model_levanter_class": LEVANTER}
    assert deviation(golden, make_config, "mixtral", (1, 4, 2), **changes) > 0.1


UNSHARDED = dict.fromkeys(
    (
        "expert_mlp", "expert_score", "experts", "head_size", "heads", "kv_head", "kv_lora", "mlp", "q_heads_per_group",
        "q_lora", "rotated_head_size", "shared_mlp", "unrotated_head_size", "value_head_size", "vocab",
    ),
    (),
)  # fmt: skip
METHODS = itertools.cycle(
    [
        AttentionPlan("ring", 1, 4, "zigzag"), AttentionPlan("ulysses", 4), AttentionPlan("hybrid", 2, 2, "zigzag"),
        AttentionPlan("all_gather", 1, 4, "zigzag"), AttentionPlan("hybrid", 2, 2),
    ]
)  # fmt: skip
SHARDED_POSITIONS = {**UNSHARDED, "position": ["model"]}


@pytest.mark.parametrize(
    ("name", "method", "model_class"),
    [
        pytest.param(name, next(METHODS), model_class, marks=[pytest.mark.whole] if (i + k) % 2 else [])
        for (i, name), (k, model_class) in itertools.product(enumerate(MODEL_TYPES), enumerate(CLASSES))
        if (name, model_class) != ("gpt2", LEVANTER)
    ],
    ids=str,
)
def test_logits_with_sharded_positions(golden, make_config, name, method, model_class):
    """The decoder, and Levanter's models with their attention modules replaced, and nothing else patched."""
    changes = {"change_plan": SHARDED_POSITIONS, "attention": method, "model_levanter_class": model_class}
    assert deviation(golden, make_config, name, (1, 2, 4), **changes) <= TOLERANCE


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_losses_and_prefill_with_sharded_positions(golden, make_config, kind):
    """Positions are in the planned order in computations, and in the order of the sequence before and after."""

    def compute(module, model, plan, mesh, tokens):
        predicted = np.ones(tokens.shape, bool)
        predicted[:, :3] = False

        def compute_step(program, *inputs):
            placed = [
                hax.named(jax.device_put(values, like.array.sharding), like.axes)
                for values, like in zip(inputs, program.arguments[1:], strict=True)
            ]
            return program.compile({})(module, *placed)

        losses = compute_step(program_of("eval", model, plan, mesh), tokens, predicted)
        next_logits = compute_step(program_of("prefill", model, plan, mesh), tokens)
        return tokens, losses.rearrange(("batch", "position")).array, next_logits.rearrange(("batch", "vocab")).array

    method = AttentionPlan("ring", 1, 4, kind)
    (tokens, losses, next_logits), logits = run(
        golden, make_config, "llama", (1, 2, 4), compute, change_plan=SHARDED_POSITIONS, attention=method
    )
    expected = (
        jax.nn.logsumexp(logits, axis=-1) - np.take_along_axis(logits, np.roll(tokens, -1, 1)[..., None], 2)[..., 0]
    )
    np.testing.assert_allclose(losses[:, 3:-1], expected[:, 3:-1], atol=TOLERANCE)
    assert not losses[:, :3].any() and not losses[:, -1].any()
    np.testing.assert_allclose(next_logits, logits[:, -1], atol=TOLERANCE)


def test_attention_class_with_more_features_is_rejected(raises_message):
    axes = hax.make_axes(embed=8, kv_head=2, head_size=4)
    config = AttentionConfig(axes[0], num_heads=2, num_kv_heads=2)
    with raises_message(ConfigError):
        with_sequence_parallel(AttentionWithSink.init(config, key=jax.random.PRNGKey(0)), Method("ring"))


@pytest.mark.parametrize(
    "method", [AttentionPlan("ring", 1, 4), AttentionPlan("ulysses", 4), AttentionPlan("all_gather", 1, 4)], ids=str
)
def test_model_that_calls_attention_itself(golden, make_config, method):
    """GPT-2 of Levanter has no module of Levanter's Attention: the function that it calls is replaced."""
    changes = {"change_plan": SHARDED_POSITIONS, "attention": method, "model_levanter_class": LEVANTER}
    assert deviation(golden, make_config, "gpt2", (1, 2, 4), **changes) <= TOLERANCE


def test_model_that_calls_attention_itself_takes_positions_in_order(golden, make_config, raises_message):
    method = AttentionPlan("ring", 1, 4, "zigzag")
    changes = {"change_plan": SHARDED_POSITIONS, "attention": method, "model_levanter_class": LEVANTER}
    with raises_message(ConfigError):
        deviation(golden, make_config, "gpt2", (1, 2, 4), **changes)
