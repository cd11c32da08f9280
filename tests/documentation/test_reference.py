"""docs/reference is as the code has it, and the JSON Schema accepts the Plans that are written, and no others."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from make_reference import FOLDER, made_files
from plan_schema import plan_schema

from shardplan import make_plan
from shardplan.plan import Plan

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(plan_schema())


@pytest.mark.parametrize("name", made_files())
def test_it_is_as_the_code_has_it(name):
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == made_files()[name], "run python scripts/make_reference.py"


@pytest.fixture(scope="module")
def plan_values(golden):
    from shardplan import config

    argv = [f"--model.ref={golden / 'llama'}", "--workload.batch=16", "--workload.position=64"]
    return json.loads(json.dumps(make_plan(config.parse_config(argv)).to_json()))


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(plan_schema())


def test_it_accepts_plans_that_are_written(plan_values):
    VALIDATOR.validate(plan_values)


def test_it_accepts_the_plan_of_version_0_1():
    """Which every later version reads."""
    values = json.loads((ROOT / "tests/unit/data/plan-0.1.json").read_text(encoding="utf-8"))
    VALIDATOR.validate(values)
    Plan.from_json(values)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (None, "mesh", {"replica": "2"}),
        (None, "schema_version", 2),
        (None, "compute_mapping", {"mlp": "model"}),
        ("workload", "batch", None),
        ("workload", "bach", 8),
        ("attention", "strategy", "rings"),
        ("memory", "peak", "much"),
    ],
)
def test_it_refuses_what_no_plan_has(plan_values, section, key, value):
    values = copy.deepcopy(plan_values)
    (values[section] if section else values)[key] = value
    assert not VALIDATOR.is_valid(values)


@pytest.mark.parametrize("key", plan_schema()["required"])
def test_it_requires_every_key_that_the_reader_requires(plan_values, key):
    values = {name: value for name, value in plan_values.items() if name != key}
    assert not VALIDATOR.is_valid(values)
