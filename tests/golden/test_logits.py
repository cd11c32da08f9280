"""Streamed with a planned sharding, every model gives the logits that transformers gives."""

import dataclasses
import itertools

import haliax as hax
import jax
import numpy as np
import pytest
from conftest import MODEL_TYPES
from levanter.layers.attention import AttentionConfig, AttentionWithSink

from shardplan.attention.levanter import Method, with_sequence_parallel
from shardplan.checkpoint.load import stream_model
from shardplan.errors import ConfigError
from shardplan.eval.documents import Windows
from shardplan.eval.evaluate import evaluate, forward_logits
from shardplan.hardware import parse_slice
from shardplan.model import build_model, read_config
from shardplan.plan.plan import AttentionPlan
from shardplan.runtime.devices import make_mesh
from shardplan.search.make_plan import make_plan
from shardplan.step import prefill_program, specialize
from shardplan.storage import open_folder

TOLERANCE = 2e-5
MESHES = [(1, 4, 2), (2, 2, 2), (1, 1, 8), (1, 8, 1)]


def run(golden, make_config, name, mesh, compute, change_model=None, change_plan=None, attention=None):
    """What `compute` gives of a module, its model, a plan on `mesh` (replica, data, model), a mesh and tokens.

    Beside the logits of transformers.
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
    )
    folder = open_folder(config.model.ref)
    model = build_model(read_config(None, folder), config.workload.position)
    model = dataclasses.replace(model, **(change_model or {}))
    plan = make_plan(config, model)
    plan = dataclasses.replace(
        plan,
        compute_mapping={**plan.compute_mapping, **(change_plan or {})},
        attention=attention or plan.attention,
    )
    model = specialize(model, plan)
    device_mesh = make_mesh(parse_slice(plan.hardware.slice), plan.mesh)
    module = stream_model(model.template, folder, device_mesh, plan.param_mapping, plan.workload.param_dtype)
    expected = np.tile(reference["logits"], (4, 1, 1))
    assert np.abs(expected).max() > 1  # so that the comparison is worth something
    return compute(module, model, plan, device_mesh, tokens), expected


def deviation(*arguments, **changes) -> float:
    """Largest difference between the logits on a mesh and those of transformers; see `run`."""
    found, expected = run(*arguments, forward_logits, **changes)
    return np.abs(found - expected).max()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.whole] if (i + j) % 2 else [])
        for (i, name), (j, mesh) in itertools.product(enumerate(MODEL_TYPES), enumerate(MESHES))
    ],
)
def test_logits_equal_transformers(golden, make_config, name, mesh):
    assert deviation(golden, make_config, name, mesh) <= TOLERANCE


def test_what_levanter_leaves_out_of_gemma2(golden, make_config):
    """Without the final soft cap the logits are as far off as those of Levanter's own model: 4e-3 to 8e-3."""
    assert 4e-3 < deviation(golden, make_config, "gemma2", (1, 4, 2), change_model={"logit_soft_cap": None}) < 8e-3


def test_why_the_tokens_of_experts_are_not_cut(golden, make_config):
    """Levanter's mixture of experts is wrong where its token axes are mapped, so no plan may map them."""
    cut = {"token": ["data"], "token_repeat": ["data"]}
    assert deviation(golden, make_config, "mixtral", (1, 4, 2), change_plan=cut) > 0.1


WHOLE = dict.fromkeys(("kv_head", "q_heads_per_group", "heads", "head_size", "mlp", "vocab", "experts"), ())
METHODS = itertools.cycle(
    [
        AttentionPlan("ring", 1, 4, "zigzag"), AttentionPlan("ulysses", 4), AttentionPlan("hybrid", 2, 2, "zigzag"),
        AttentionPlan("all_gather", 1, 4, "zigzag"), AttentionPlan("hybrid", 2, 2),
    ]
)  # fmt: skip
CUT = {**WHOLE, "position": ["model"]}


@pytest.mark.parametrize(("name", "method"), [(name, next(METHODS)) for name in MODEL_TYPES if name != "gpt2"], ids=str)
def test_with_positions_cut(golden, make_config, name, method):
    """Levanter's models with sequence-parallel attention as planned, and nothing patched."""
    assert deviation(golden, make_config, name, (1, 2, 4), change_plan=CUT, attention=method) <= TOLERANCE


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_losses_and_prefill_with_positions_cut(golden, make_config, kind):
    """In the order of a layout while computing, and in the sequence's before and after."""

    def compute(module, model, plan, mesh, tokens):
        predicted = np.ones(tokens.shape, bool)
        predicted[:, :3] = False
        found = evaluate(module, model, plan, mesh, Windows(tokens, predicted, np.arange(len(tokens))))
        program = prefill_program(model, plan, mesh)
        prompt = jax.device_put(tokens, program.arguments[1].array.sharding)
        following = program.compile({})(module, hax.named(prompt, program.arguments[1].axes))
        return tokens, found.losses, following.rearrange(("batch", "vocab")).array

    method = AttentionPlan("ring", 1, 4, kind)
    (tokens, losses, following), logits = run(
        golden, make_config, "llama", (1, 2, 4), compute, change_plan=CUT, attention=method
    )
    expected = (
        jax.nn.logsumexp(logits, axis=-1) - np.take_along_axis(logits, np.roll(tokens, -1, 1)[..., None], 2)[..., 0]
    )
    np.testing.assert_allclose(losses[:, 3:-1], expected[:, 3:-1], atol=TOLERANCE)
    assert not losses[:, :3].any() and not losses[:, -1].any()
    np.testing.assert_allclose(following, logits[:, -1], atol=TOLERANCE)


def test_attention_that_does_more():
    axes = hax.make_axes(embed=8, kv_head=2, head_size=4)
    config = AttentionConfig(axes[0], num_heads=2, num_kv_heads=2)
    with pytest.raises(ConfigError, match="AttentionWithSink is more than Levanter's Attention"):
        with_sequence_parallel(AttentionWithSink.init(config, key=jax.random.PRNGKey(0)), Method("ring"))


def test_attention_of_its_own(golden, make_config):
    with pytest.raises(ConfigError, match="Gpt2LMHeadModel has attention of its own"):
        deviation(golden, make_config, "gpt2", (1, 2, 4), attention=AttentionPlan("ring", 1, 4))
