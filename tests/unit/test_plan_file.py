"""Plan files: the keys of the contract, and clear errors for what is not one."""

import json

import pytest

from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.plan.planner import make_plan


@pytest.fixture
def plan(golden, make_config):
    return make_plan(make_config(model_ref=golden / "llama", workload_position=64))


def test_saved_plan_loads_back(plan, tmp_path):
    path = tmp_path / "sub" / "plan.json"
    plan.save(str(path))
    assert Plan.load(str(path)) == plan
    values = json.loads(path.read_text())
    assert next(iter(values)) == "schema_version" and values["schema_version"] == 1
    # the contract: keys may be added, not renamed
    assert {"model", "workload", "hardware", "mesh", "compute_mapping", "param_mapping", "parameters", "memory", "cost",
            "compiler_options", "attention", "search", "versions"} <= values.keys()  # fmt: skip
    assert {"parameters", "optimizer", "gradients", "activations", "load_transient", "peak", "available"} <= values[
        "memory"
    ].keys()
    assert {"path", "axes", "dtype", "spec", "bytes_per_device"} <= values["parameters"][0].keys()
    assert all(isinstance(axes, list) for axes in values["param_mapping"].values())


def test_unusable_files(plan, tmp_path):
    path = tmp_path / "plan.json"
    for text, message in (
        ("{", "is not JSON"),
        ('{"schema_version": 7}', "plan has schema_version 7; this shardplan reads 1; plan again"),
        ('{"schema_version": 1}', "not a plan"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Plan.load(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(str(tmp_path / "none.json"))
