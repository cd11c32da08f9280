"""Arrays that are not as planned are named before they cost memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import audit, load_pretrained, make_mesh, make_plan
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.monitoring.audit import check_like_parameters


@pytest.fixture(scope="module")
def loaded(golden):
    """The golden Llama, loaded as planned, and its plan."""
    from shardplan import load_config

    config = load_config(
        model={"ref": str(golden / "llama")},
        hardware={"slice": "cpu-8"},
        mesh={"model": 4, "data": 2},
        workload={"batch": 4, "position": 64, "param_dtype": "float32"},
        pin=["mlp=model", "params.mlp=model"],
    )
    plan = make_plan(config, build_model(read_config(None, _folder(golden)), 64))
    return load_pretrained(str(golden / "llama"), plan=plan), plan


def _folder(golden):
    from shardplan.storage import open_folder

    return open_folder(str(golden / "llama"))


def gate_proj(model):
    return model.segments[0].stacked.layers[0].mlp.gate_proj.weight.array


def test_a_model_as_planned(loaded):
    model, plan = loaded
    lines = str(audit(model, plan)).splitlines()
    assert len(lines) == len(plan.parameters) + 2 and all(line.endswith("as planned") for line in lines[1:-1])
    total = sum(parameter.bytes_per_device for parameter in plan.parameters)
    assert lines[-1] == f"{total:,} bytes per device"


def test_a_replicated_parameter_is_named(loaded, raises_message):
    model, plan = loaded
    array = gate_proj(model)
    replicated = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    with raises_message(ConfigError):
        audit(eqx.tree_at(gate_proj, model, replicated), plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda array: array.astype(jnp.bfloat16), "gate_proj.weight is bfloat16, planned is float32"),
        (lambda array: jnp.asarray(jax.device_get(array)), "gate_proj.weight is replicated, planned is sharded by"),
    ],
)
def test_other_types_and_devices_are_named(loaded, change, message):
    model, plan = loaded
    with pytest.raises(ConfigError, match=message):
        audit(eqx.tree_at(gate_proj, model, change(gate_proj(model))), plan)


def test_what_an_optimizer_keeps_is_sharded_like_the_parameters(loaded, raises_message):
    """Adam's moments, and not what has another shape, such as its count."""
    model, plan = loaded
    state = optax.adam(1e-3).init(eqx.filter(model, eqx.is_inexact_array))
    check_like_parameters(state, type(model), plan)
    array = gate_proj(state[0].mu)
    replicated = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    moments = eqx.tree_at(gate_proj, state[0].mu, replicated)
    with raises_message(ConfigError):
        check_like_parameters((state[0]._replace(mu=moments), *state[1:]), type(model), plan)


def test_a_mesh_of_levanter_has_axes_across_slices(loaded, raises_message):
    """A sharding is as planned if the axes of a mesh axis, within and across slices, have its devices together."""
    model, plan = loaded
    planned = make_mesh(plan)
    axes = ("replica_dcn", "data_dcn", *planned.axis_names)
    sizes = (1, 2, *(1 if axis == "data" else size for axis, size in plan.mesh.items()))
    mesh = Mesh(planned.devices.reshape(sizes), axes)

    def move(array):
        spec = [tuple("data_dcn" if axis == "data" else axis for axis in each or ()) or None for each in spec_of(array)]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def spec_of(array):
        return [(each,) if isinstance(each, str) else each for each in array.sharding.spec]

    audit(jax.tree.map(move, model), plan)
    other = Mesh(planned.devices.reshape((2, 1, *sizes[2:])), axes)
    moved = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(other, PartitionSpec())), model)
    with raises_message(ConfigError):
        audit(moved, plan)
