"""Gradient checkpointing that keeps activations by their names, as Levanter's `save_block_internals` asks for."""

import pytest

from shardplan.cost.gspmd import device_cost
from shardplan.cost.memory import estimate_memory
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.execution import specialize
from shardplan.levanter_config.model_section import parse_model_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.step_trace import plan_step
from shardplan.search.given_plan import plan_given_mappings

LAYERS, TOKENS, EMBED, MLP = 4, 2048, 5120, 20480
"""Of a Pythia 12B with fewer layers, whose parameters and activations are bfloat16."""


@pytest.fixture(scope="module")
def pythia():
    return build_model({**read_config("pythia-12b", None), "num_hidden_layers": LAYERS}, TOKENS)


def trained(model, checkpointing):
    """Bytes of activations, and FLOPs of matmuls, of a device that trains on one sequence."""
    step = plan_step(model, Workload("train", 8, TOKENS, "bfloat16", gradient_checkpointing=checkpointing))
    mesh, tokens = {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}
    assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
    flops = sum(device_cost(task, assignment).matmul.flops for task in step.tasks)
    return estimate_memory(step, assignment).activations, flops


@pytest.mark.parametrize(
    ("names", "size", "recomputed"),
    [
        ("up_proj", MLP, EMBED * MLP),
        ("query_proj+key_proj+value_proj", 3 * EMBED, 3 * EMBED * EMBED),
        ("attn_out+mlp_out", 0, 0),  # both are added to the stream: no derivative needs them
    ],
)
def test_what_is_kept_is_not_recomputed(pythia, names, size, recomputed):
    """A layer keeps `size` elements for each token, and computes matmuls with so many weights once less."""
    kept, flops = trained(pythia, f"default+{names}")
    base, base_flops = trained(pythia, "default")
    assert base_flops - flops == LAYERS * 2 * TOKENS * recomputed
    layer = 2 * TOKENS * size  # one layer is in memory while it is recomputed
    assert (LAYERS - 1) * layer <= kept - base <= LAYERS * layer


def test_names_that_no_activation_has_are_refused(pythia):
    """Haliax would keep nothing, and say nothing; a Llama of Levanter has only the names of Haliax's loops."""
    llama = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, TOKENS)
    with pytest.raises(ConfigError, match=r"keeps 'up_prj', and no activation of the model has .* 'up_proj'"):
        trained(pythia, "default+up_prj")
    with pytest.raises(ConfigError, match=r"keeps 'attn_out', and .* scan\(layer\)__carry"):
        trained(llama, "default+attn_out")
    trained(llama, "default+shardplan_attention")  # of ring attention, which a plan decides


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("defualt+attn_out", "is 'defualt.attn_out'; did you mean 'default'"),
        ("save_all+attn_out", "is 'save_all.attn_out'; names of activations go with default, nested, offload, recomp"),
        ("default+", "is 'default.'; it lacks a name, as in default.attn_out"),
    ],
)
def test_values_are_checked(make_config, value, problem):
    with pytest.raises(ConfigError, match=f"workload.gradient_checkpointing {problem}"):
        make_config(model_config="pythia-12b", workload_kind="train", workload_gradient_checkpointing=value)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"save_block_internals": ["attn_out", "up_proj"]}, "default+attn_out+up_proj"),
        ({"save_carries": False, "save_block_internals": ["attn_out"]}, "recompute+attn_out"),
        ({"nested": True, "save_block_internals": ["attn_out"]}, "nested+attn_out"),
        ({"save_carries": "offload", "save_block_internals": ["attn_out"]}, "offload+attn_out"),
        ({"save_block_internals": []}, "default"),
        ({"simple": True, "save_block_internals": ["attn_out"]}, "default"),
    ],
)
def test_policies_of_levanters_files(policy, expected):
    """As Haliax has them: a policy that is `simple` takes no names."""
    assert parse_model_section({"model": {"gradient_checkpointing": policy}}).gradient_checkpointing == expected


def test_the_model_of_a_plan_has_its_policy(make_config, pythia):
    config = make_config(
        model_config="pythia-12b",
        hardware_slice="v5p-16",
        workload_kind="train",
        workload_position=TOKENS,
        workload_gradient_checkpointing="recompute+up_proj",
    )
    plan = plan_given_mappings(config, pythia, {"replica": 1, "data": 8, "model": 1}, {"batch": ["data"]}, {})
    comments = " ".join(trainer_yaml(plan).replace("# ", "").split())
    assert "must be {save_block_internals: [up_proj], save_carries: false}, as planned." in comments
    policy = specialize(pythia, plan).template.segments[0].gradient_checkpointing
    assert (policy.save_carries, policy.save_block_internals, policy.simple) == (False, ["up_proj"], False)
