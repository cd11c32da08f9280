"""Gradient checkpointing that keeps activations by their names, as Levanter's `save_block_internals` asks for."""

import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from haliax.nn import Linear

from shardplan.cost.calibration import Calibration
from shardplan.cost.gspmd import device_cost
from shardplan.cost.memory import estimate_memory, host_bytes
from shardplan.cost.roofline import exposed_host_copies, host_copy_seconds
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.execution import specialize
from shardplan.hardware import parse_slice
from shardplan.levanter_config.model_section import parse_model_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.model.gradient_checkpointing.activation_names import with_activation_names
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.workload.checkpointing import checkpointing_problem
from shardplan.plan.workload.workload import Workload
from shardplan.program.layer_flops import MATMULS
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import TaskKind
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("checkpointing", "size"), [("offload_carries", EMBED), ("default+up_proj@host", MLP), ("default", 0)]
)
def test_what_is_moved_to_the_host(pythia, checkpointing, size):
    """Every layer's activation is copied there and back, and takes memory there, and none of the device's."""
    step = plan_step(pythia, Workload("train", 8, TOKENS, "bfloat16", gradient_checkpointing=checkpointing))
    mesh, tokens = {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}
    assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
    stack = LAYERS * TOKENS * size * 2
    assert host_bytes(step, assignment) == stack
    copies = [task for task in step.tasks if task.kind == TaskKind.HOST_COPY]
    hardware = parse_slice("v5p-16")
    seconds = [host_copy_seconds(task, device_cost(task, assignment), hardware) for task in copies]
    assert seconds == [stack / hardware.generation.host_bandwidth] * (2 if size else 0)
    kept = checkpointing.replace("offload_carries", "default").removesuffix("@host")
    difference = trained(pythia, kept)[0] - trained(pythia, checkpointing)[0]
    assert (LAYERS - 1) / LAYERS * stack <= difference <= stack


def test_a_log_sum_exp_is_kept_with_a_context():
    """Kernels give both one name: four more bytes for each token and query head. Without a kernel there is none."""
    llama = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": LAYERS}, TOKENS)
    step = plan_step(llama, Workload("train", 8, TOKENS, "bfloat16", gradient_checkpointing="default+context@host"))
    mesh, tokens = {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}
    assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
    query_heads, head_size = 32, 128
    assert host_bytes(step, assignment) == LAYERS * TOKENS * query_heads * (2 * head_size + 4)
    without_kernel = replace(assignment, quirks=CompilerQuirks(plain_attention=True))
    assert host_bytes(step, without_kernel) == LAYERS * TOKENS * query_heads * 2 * head_size


def test_copies_that_are_longer_than_their_layer_are_waited_for(pythia):
    """The copies of a layer share the time of its matmuls, and what is longer than that is waited for.

    On the way to the host these are the matmuls before the up projection: those of attention.
    """
    step = plan_step(pythia, Workload("train", 8, TOKENS, "bfloat16", gradient_checkpointing="default+up_proj@host"))
    mesh, tokens = {"replica": 1, "data": 8, "model": 1}, {"batch": ("data",)}
    assignment = ShardingAssignment(mesh, tokens, {"embed": ("data",)}, step.merged_axes, step.activation_axes)
    hardware, factors = parse_slice("v5p-16"), Calibration()
    slow, fast = (replace(hardware, generation=replace(hardware.generation, host_bandwidth=n)) for n in (1e9, 1e12))
    in_layers = [task.executions == LAYERS for task in step.tasks]
    end = in_layers.index(False, in_layers.index(True))  # of the loop of the forward pass
    for tasks, hides in ((step.tasks[:end], lambda task: "mlp" not in task.label), (step.tasks[end:], lambda _: True)):
        [copy] = [task for task in tasks if task.kind == TaskKind.HOST_COPY]
        cost, matmuls = device_cost(copy, assignment), [task for task in tasks if task.kind in MATMULS]
        flops = sum(task.flops for task in matmuls if task.executions == LAYERS and hides(task))
        for each, is_hidden in ((fast, True), (slow, False)):
            hidden = LAYERS * flops / each.devices / each.generation.flops
            (exposed,) = exposed_host_copies([(copy, host_copy_seconds(copy, cost, each))], each, factors)
            assert exposed == pytest.approx(max(0.0, host_copy_seconds(copy, cost, each) - hidden), rel=1e-9)
            assert (exposed == 0) is is_hidden


@pytest.mark.slow
def test_blocks_of_layers_divide_the_layers(pythia, raises_message):
    """Two blocks of four layers, as Haliax chooses by itself, or one of all; three are refused."""

    def step(text):
        workload = Workload("train", 8, TOKENS, "bfloat16", gradient_checkpointing=text)
        return plan_step(pythia, workload).tasks

    assert step("nested:2") == step("nested") != step("nested:1")
    with raises_message(ConfigError):
        step("nested:3")
    assert checkpointing_problem("x", "nested:0") == "x is 'nested:0'; nested takes at least one block of layers"
    for text in ("nested:a", "default:4", "nested:"):
        assert checkpointing_problem("x", text).startswith(f"x is '{text}'; ")


@pytest.mark.slow
def test_names_that_no_activation_has_are_refused(pythia, raises_message):
    """Haliax would keep nothing, and say nothing."""
    llama = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, TOKENS)
    with raises_message(ConfigError):
        trained(pythia, "default+up_prj")
    with raises_message(ConfigError):
        trained(llama, "default+gate_prj")
    with raises_message(ConfigError):
        trained(pythia, "default+gate_proj")  # its MLP has no gate


def test_activations_of_levanters_modules_have_names():
    """From outside, once each, without any other change: the module has the same parameters, at the same paths."""
    module = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, TOKENS).template
    named = with_activation_names(module)
    assert [path for path, _ in named_leaves(named)] == [path for path, _ in named_leaves(module)]
    assert jax.tree.structure(with_activation_names(named)) == jax.tree.structure(named) != jax.tree.structure(module)


@pytest.mark.parametrize(
    ("kept", "ordered"),
    [
        ([], {}),
        (["context", "gate_proj"], {"o_proj": 1, "gate_proj": 3}),
        (["mlp_out"], {"down_proj": 2}),
    ],
)
def test_the_order_of_what_is_kept_is_fixed(kept, ordered):
    """And of what follows from the residual stream, which is kept too; the compiler orders the rest as it likes."""
    module = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, TOKENS).template
    named = with_activation_names(module, kept)
    constraints = {}
    for path, node in jax.tree_util.tree_flatten_with_path(named, is_leaf=lambda node: isinstance(node, Linear))[0]:
        if isinstance(node, Linear) and path[-1].name != "lm_head":
            multiply = partial(node.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
            jaxpr = jax.make_jaxpr(multiply)(np.ones((2, 4)), np.ones((4, 2)))
            constraints[path[-1].name] = str(jaxpr).count("layout_constraint[")
    from_residual = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 1, "up_proj": 1}
    assert constraints == {"o_proj": 0, "down_proj": 0, **from_residual, **ordered}


@pytest.mark.parametrize(
    ("weight", "orders"),
    [
        ((8, 4, 128), ["(0, 1, 2)", "(0, 2, 3, 1, 4)", "(0, 2, 3, 1, 4)"]),
        ((64,), ["(0, 1, 2)", "(0, 1, 2)", "(0, 1, 2)"]),
    ],
)
def test_positions_are_before_the_last_dimension_of_what_is_kept(weight, orders):
    """Of queries the last but one dimension is the heads of a group, which are fewer than the rows of a tile."""
    module = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": 2}, TOKENS).template
    named = with_activation_names(module, ["query_proj"])
    multiply = partial(named.transformer.layers.stacked.self_attn.q_proj.dot_general,
                       dimension_numbers=(((2,), (0,)), ((), ())))  # fmt: skip
    text = str(jax.make_jaxpr(multiply)(np.ones((2, 32, 16)), np.ones((16, *weight))))
    assert re.findall(r"major_to_minor=(\(.*?\))", text) == orders  # of the operand, and around the name


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("defualt+attn_out", "is 'defualt.attn_out'; did you mean 'default'"),
        (
            "save_all+attn_out",
            "is 'save_all.attn_out'; names of activations go with default, nested, offload, offload_carries, recomp",
        ),
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
        ({"nested": 4, "save_block_internals": ["attn_out"]}, "nested:4+attn_out"),
        ({"save_carries": "offload", "save_block_internals": ["attn_out"]}, "offload_carries+attn_out"),
        (
            {"save_block_internals": ["attn_out"], "offload_block_internals": ["up_proj"]},
            "default+attn_out+up_proj@host",
        ),
        ({"save_block_internals": []}, "default"),
        ({"simple": True, "save_block_internals": ["attn_out"]}, "default"),
    ],
)
def test_policies_of_levanters_files(policy, expected):
    """As Haliax has them: a policy that is `simple` takes no names."""
    assert parse_model_section({"model": {"gradient_checkpointing": policy}}).gradient_checkpointing == expected


@pytest.mark.slow
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
