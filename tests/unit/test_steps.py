"""What is priced is what runs: tracing and compiling call the same function of a kind of step, with the same arrays."""

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import GOLDEN
from jax.sharding import Mesh

from shardplan import make_plan
from shardplan.config import load_config
from shardplan.cost.gspmd import device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.execution import step_program
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import build_model
from shardplan.plan.workload.kinds import KINDS
from shardplan.plan.workload.workload import Workload
from shardplan.program.named_arrays import shape_of
from shardplan.program.step_trace import plan_step, trace_step
from shardplan.program.trace import ArrayClass
from shardplan.search.make_plan import model_from_config
from shardplan.steps.kinds import STEP_KINDS

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
POSITION = 32


def test_every_kind_of_workload_has_a_step():
    assert STEP_KINDS.keys() == KINDS.keys()


@pytest.fixture(scope="module")
def model():
    hf_config = {**read_config("llama-3.1-8b", None), **SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2}
    return build_model({**hf_config, "head_dim": 16}, POSITION)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_traced_and_the_compiled_step_have_the_same_arrays(kind):
    config = load_config(
        model={"config": str(GOLDEN / "llama" / "config.json")}, hardware={"slice": "cpu-8"},
        workload={"kind": kind, "batch": 8, "position": POSITION, "microbatches": 2 if kind == "train" else 1},
    )  # fmt: skip
    model = model_from_config(config)
    plan = make_plan(config, model)
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(plan.mesh.values())), tuple(plan.mesh))
    program = step_program(model, plan, mesh)
    abstract = eqx.filter(program.arguments, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    compiled = [(leaf.shape, leaf.dtype.itemsize) for leaf in jax.tree.leaves(abstract)]
    trace = trace_step(model, plan.workload.resolve())
    traced = [(shape_of(trace.arrays[i]), trace.arrays[i].itemsize) for i in trace.arguments]
    assert traced == compiled


@pytest.mark.slow
def test_arguments_have_classes(model):
    """An optimizer's moments are stored arrays, and tokens are inputs, whatever their axes are called."""
    trace = trace_step(model, Workload("train", 4, POSITION, "float32", optimizer="adamw").resolve())
    parameters = trace.arguments_of(ArrayClass.PARAMETER)
    assert len(trace.arguments_of(ArrayClass.STATE)) == 2 * len(parameters) + 1  # both moments, and the step count
    assert [array.itemsize for array in trace.arguments_of(ArrayClass.INPUT)] == [
        4,
        1,
    ]  # tokens, and which are predicted


@pytest.mark.slow
def test_the_update_of_the_parameters_is_priced(model):
    """Adam reads and writes two moments in float32, 16 bytes a weight, which gradient descent does not have."""

    def moved_bytes(optimizer):
        step = plan_step(model, Workload("train", 4, POSITION, "float32", optimizer=optimizer).resolve())
        unsharded = ShardingAssignment({}, {}, {}, step.merged_axes, step.activation_axes)
        return sum(device_cost(task, unsharded).memory_bytes for task in step.tasks)

    more = (moved_bytes("adamw") - moved_bytes("sgd")) / inspect_model(model).size
    # 8 more where the update reads the new moments, and 2 where each of them reads the gradient in bfloat16
    assert 16 <= more <= 27
