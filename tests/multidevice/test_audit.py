"""Arrays that are not as planned are named before they cost memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardplan import audit, load_pretrained, make_plan
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model


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


def test_a_replicated_parameter_is_named(loaded):
    model, plan = loaded
    array = gate_proj(model)
    replicated = jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    message = (
        r"^not as planned: segments\[0\]\.stacked\.layers\[0\]\.mlp\.gate_proj\.weight is replicated, planned is "
        r"sharded by "
        r"P\(None, .*'model'.*\) \(\d\.\d\d instead of \d\.\d\d GiB per device\); load the model with this plan"
    )
    with pytest.raises(ConfigError, match=message):
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
