"""Plans with weights that are kept as stored: bytes and transfers by hand, and what a plan says of the other form."""

import dataclasses
import json
from pathlib import Path

import pytest

from shardplan.config.given_plan import load_given_plan
from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "golden" / "families" / "deepseek_v3_fp8" / "config.json"
DEVICES, MLP, EMBED, LAYERS = 4, 264, 136, 5


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The flags of a model with one layer without experts, and 4 with experts."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(json.loads(CONFIG.read_text()) | {"num_hidden_layers": LAYERS}))
    return {"model_config": path, "hardware_slice": "v5p-8", "workload_batch": 8, "workload_position": 8}


def test_codes_are_stored_and_gathered(make_config, settings):
    """A byte for each code on a device and on the links, and two bytes where the weights are numbers."""
    transfers, sizes = [], []
    for keeps in (True, False):
        config = make_config(load_keep_dtype=keeps, **settings)
        mesh = {"replica": 1, "data": DEVICES, "model": 1}
        plan = plan_given_mappings(
            config, model_from_config(config), mesh, {"batch": ["data"]}, {"embed": ["data"], "expert_embed": ["data"]}
        )
        (weight,) = (
            each
            for each in plan.parameters
            if f"{each.path}.".find("mlp.gate_proj.weight.") > 0 and not each.path.endswith("scales")
        )
        (transfer,) = (each for each in plan.cost.collectives if weight.path in each.cause)
        assert weight.dtype == ("float8_e4m3fn" if keeps else "bfloat16")
        sizes.append(weight.bytes_per_device)
        transfers.append(transfer.bytes)
        assert plan.model.kept_dtype == ("float8_e4m3fn" if keeps else None)
    assert sizes == [MLP * EMBED / DEVICES, 2 * MLP * EMBED / DEVICES]
    received = MLP * EMBED * (DEVICES - 1) // DEVICES
    assert transfers == [received, 2 * received]


def test_each_form_says_what_the_other_would_change(make_config, settings):
    kept, numbers = (make_plan(make_config(load_keep_dtype=keeps, **settings)) for keeps in (True, False))
    assert any(
        reason.startswith("weights in bfloat16 instead (without load.keep_dtype): ") for reason in kept.search.reasons
    )
    assert any(
        reason.startswith("weights kept in float8_e4m3fn instead (load.keep_dtype): ")
        for reason in numbers.search.reasons
    )
    assert kept.memory.parameters < numbers.memory.parameters
    assert Plan.from_json(kept.to_json()) == dataclasses.replace(kept, details=Plan.from_json(kept.to_json()).details)
    assert "kept_dtype" not in numbers.to_json()["model"]


def test_a_given_plan_decides(make_config, settings, tmp_path, raises_message):
    plan = make_plan(make_config(load_keep_dtype=True, **settings))
    path = tmp_path / "plan.json"
    plan.save(str(path))
    config, _ = load_given_plan(make_config(plan=path))
    assert config.load.keep_dtype
    with raises_message(ConfigError):
        load_given_plan(make_config(plan=path, load_keep_dtype="false"))


def test_plans_of_plain_checkpoints_say_nothing(make_config):
    plan = make_plan(make_config(model_config="llama-3.2-1b", hardware_slice="v5p-8"))
    assert not any("keep_dtype" in reason for reason in plan.search.reasons)
