"""Plan files: the keys of the contract, and clear errors for what is not one."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from shardplan.config import PlanConfig, parse_config
from shardplan.config.given_plan import load_given_plan
from shardplan.config.keys import keys_of
from shardplan.errors import ConfigError
from shardplan.model.model_class import DECODER, LEVANTER, LEVANTER_CLASSES
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import check_model
from shardplan.search.make_plan import make_plan, model_from_config

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def plan(golden):
    return make_plan(parse_config([f"--model.ref={golden / 'llama'}", "--workload.position=64"]))


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


def test_unusable_files(plan, tmp_path, raises_message):
    path = tmp_path / "plan.json"
    for text, message in (
        ("{", "is not JSON"),
        ('{"schema_version": 7}', "plan has schema_version 7; this shardplan reads 1; plan again"),
        ('{"schema_version": 1}', "not a valid plan (plan again): workload has no batch, "),
        ("[]", "not a plan: it has no schema_version; `shardplan plan --json` writes one"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            Plan.load(str(path))
    with raises_message(ConfigError):
        Plan.load(str(tmp_path / "none.json"))


def put(values, path, value):
    *sections, key = path.split(".")
    for section in sections:
        values = values[int(section) if isinstance(values, list) else section]
    values[key] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mesh", {}, "its mesh is empty; it must be replica x data x model"),
        ("mesh.expert", 2, "model 1 x expert 2; it must be replica x data x model"),
        ("mesh.data", 3, "x data 3 x model 1 and 8 devices, where cpu-8 has 8"),
        ("hardware.devices", 9, "and 9 devices, where cpu-8 has 8"),
        ("hardware.slice", "v9-1", "v9"),
        ("compute_mapping.mlp", ["modle"], "compute_mapping.mlp has mesh axis 'modle'; did you mean 'model'?"),
        ("param_mapping.mlp", ["data", "data"], "param_mapping.mlp has a mesh axis twice: data, data"),
        ("memory.peak", None, "memory.peak is None"),
        ("memory.peak", -1, "memory.peak is -1"),
        ("cost.step_seconds", float("nan"), "cost.step_seconds is nan"),
        ("cost.step_seconds", 0.0, "cost.step_seconds is 0; it must be more than 0"),
        ("parameters", [], "it has no parameters"),
        ("mesh", {"replica": -1, "data": -8, "model": 1}, "data -8 x model 1; it must be replica x data x model, each"),
        ("workload.kind", "evaluate", "workload.kind is 'evaluate'; did you mean 'eval'?"),
        ("workload.microbatches", 2, "workload.microbatches is 2: only training has them"),
        ("param_mapping", {"embed": ["model"]}, ", not that of param_mapping"),
    ],
)
def test_damaged_plans(plan, tmp_path, key, value, message):
    """Valid JSON of the right types, except for null, that is not a plan."""
    values = plan.to_json()
    put(values, key, value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        Plan.load(str(path))
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def sharded_plan(golden):
    """A plan for v4-16 that shards the batch, the vocabulary and the embedding."""
    arguments = [f"--model.ref={golden / 'llama'}", "--hardware.slice=v4-16", "--workload.position=64", "--mesh.data=4"]
    pins = ["--pin", "batch=data", "position=", "vocab=model", "params.embed=data"]
    return make_plan(parse_config([*arguments, "--mesh.replica=1", *pins]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("workload.batch", 9, "workload.batch is 9, which the 4 shards over data do not divide"),
        ("workload.param_dtype", "float32", "has dtype bfloat16, workload.param_dtype is float32"),
        ("hardware.slice", "v5p-16", "hardware.hbm_gib is 30.75, v5p-16 has 95.74"),
        ("hardware.hbm_gib", 0.0001, "hardware.hbm_gib is 0.0001, v4-16 has 30.75"),
        ("memory.available", 1, "memory.available is 1, not the bytes of hardware.hbm_gib 30.75"),
        ("memory.parameters", 1, "memory.parameters is 1, those of the list are "),
        ("compute_mapping.mpl", ["model"], "compute_mapping has logical axis 'mpl'; did you mean 'mlp'?"),
        ("param_mapping.heds", ["model"], "param_mapping has logical axis 'heds'; did you mean 'heads'?"),
        ("mesh", {"replica": 1, "data": 8, "model": 1}, "has bytes_per_device "),
        ("parameters.0.bytes_per_device", 1, "embedding has bytes_per_device 1, its size over 8 shards is 6144"),
        ("parameters.0.axes.embed", 98, "embed of embedding is 98, which the 4 shards over data "),
        # what contradicts nothing, and is no longer what was planned
        ("workload.batch", 16, "it differs from what was written, so that its memory and times may be those of"),
        ("cost.step_seconds", 1e-9, "it differs from what was written"),
        ("memory.activations", 1, "it differs from what was written"),
    ],
)
def test_plans_edited_by_hand(sharded_plan, tmp_path, key, value, message):
    """Each part is a valid one, and contradicts another: without a check the estimates would be those of before."""
    values = sharded_plan.to_json()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    assert Plan.load(str(path)) == sharded_plan
    values = json.loads(path.read_text())
    put(values, key, value)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        Plan.load(str(path))
    assert message in str(raised.value) and str(raised.value).startswith(f"{path}: ")
    assert str(raised.value).endswith("; a Plan that was edited by hand cannot be used, plan again")


def test_given_mappings_may_have_axes_of_other_models(sharded_plan, tmp_path):
    mapping = {**sharded_plan.compute_mapping, "experts": ["data"]}
    given = dataclasses.replace(sharded_plan.search, given=True)
    dataclasses.replace(sharded_plan, compute_mapping=mapping, search=given).save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")).compute_mapping == mapping


def test_a_plan_for_virtual_devices_loads_on_another_machine(plan, tmp_path):
    """Their memory is that of the machine that planned."""
    values = json.loads(json.dumps(plan.to_json()))
    values["hardware"]["hbm_gib"], values["memory"]["available"] = 0.5, 2**29
    Plan.from_json(values).save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")).hardware.hbm_gib == 0.5


@pytest.fixture
def sequence_plan(golden, make_config):
    """A plan that shards positions over all eight devices."""
    config = make_config(model_ref=golden / "llama", workload_position=64, workload_batch=1, hardware_slice="cpu-8")
    return make_plan(dataclasses.replace(config, pin=("position=replica+data", "mesh.replica=2", "mesh.data=4")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "rings"}, "attention.strategy is 'rings'; did you mean 'ring'?"),
        ({"strategy": "ring", "ulysses": 2}, "attention.ulysses 2 x ring 8 where 8 devices shard position"),
        ({"strategy": "ring", "ulysses": 8, "ring": 1}, "attention.ulysses 8 x ring 1 where the strategy is ring"),
        ({"strategy": "ulysses"}, "attention.ulysses 1 x ring 8 where the strategy is ulysses"),
        ({"strategy": "none"}, "attention.ulysses 1 x ring 8 where the strategy is none"),
        ({"strategy": "none", "ring": 1, "layout": "zigzag"}, "attention.layout zigzag where the strategy is none"),
        ({"strategy": "hybrid", "ulysses": -2, "ring": -4}, "attention.ulysses -2 x ring -4; each must be at least 1"),
    ],
)
def test_damaged_attention(sequence_plan, changes, message):
    """Unchecked, these would run with wrong results."""
    whole = {"strategy": "ring", "ulysses": 1, "ring": 8, "layout": "zigzag"}
    values = {**sequence_plan.to_json(), "attention": whole}
    assert Plan.from_json(values).attention == AttentionPlan(**whole)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Plan.from_json({**values, "attention": {**whole, "layout": "contiguous", **changes}})


def test_positions_that_a_plan_cannot_have(sequence_plan):
    values = sequence_plan.to_json()
    for key, value, message in (
        ("compute_mapping.batch", ["data"], "compute_mapping has batch and position both on data"),
        ("workload.kind", "train", "attention.layout zigzag where workload.kind is train"),
        ("workload.position", 40, "attention.layout zigzag with attention.ulysses 1 x ring 8: 40 positions do not"),
    ):
        changed = json.loads(json.dumps(values))
        changed["attention"] = {"strategy": "ring", "ulysses": 1, "ring": 8, "layout": "zigzag"}
        changed["workload"]["logit_blocks"] = None
        put(changed, key, value)
        with pytest.raises(ConfigError, match=re.escape(message)):
            Plan.from_json(changed)


def test_two_dimensions_of_a_parameter_on_one_mesh_axis(plan, raises_message):
    values = plan.to_json()
    spec = next(p["spec"] for p in values["parameters"] if len(p["spec"]) > 1)
    spec[:2] = [["model"], ["model"]]
    with raises_message(ConfigError):
        Plan.from_json(values)


def test_positions_have_the_name_that_the_model_gives_them(plan, raises_message):
    values = plan.to_json()
    values["model"]["position"] = "tokens"
    values["compute_mapping"] = {"batch": ["data"], "tokens": ["data"]}
    with raises_message(ConfigError):
        Plan.from_json(values)


def test_a_given_plan_is_not_changed(plan, golden, make_config, tmp_path, raises_message):
    """A setting that differs from the plan is refused, even if it is the default."""
    path = str(tmp_path / "plan.json")
    plan.save(path)
    read = ["--plan", path]
    assert load_given_plan(parse_config(read))[1] == plan
    assert load_given_plan(parse_config([*read, "--workload.microbatches", "null"]))[1] == plan
    default = keys_of(PlanConfig)["workload.position"].default
    with raises_message(ConfigError):
        load_given_plan(parse_config([*read, "--workload.position", str(default)]))
    with raises_message(ConfigError):
        load_given_plan(parse_config([*read, "--hardware.host_gib", "8"]))
    for rule in ("pin", "forbid"):
        with raises_message(ConfigError):
            load_given_plan(parse_config([*read, f"--{rule}", "mlp=model"]))


def test_a_plan_of_version_0_1_loads():
    """Written before `caveats`, `model_flops`, settings of scores and experts, host memory and parts of `model`."""
    values = json.loads((DATA / "plan-0.1.json").read_text(encoding="utf-8"))
    plan = Plan.load(str(DATA / "plan-0.1.json"))
    written = json.loads(json.dumps(plan.to_json()))
    assert written["search"].pop("caveats") == [] and plan.mfu is None
    assert written["cost"].pop("model_flops") is None and written["model"].pop("position") == "position"
    assert written["model"].pop("levanter_class") is None and written["model"].pop("vocab") == "vocab"
    assert written["model"].pop("unsharded_in_kernels") == ["q_heads_per_group", "head_size"]
    settings = {"top_k": 40, "temperature": 1.0, "window": None, "logit_blocks": None, "expert_load_spread": 0}
    for key, value in settings.items():
        assert written["workload"].pop(key) == value
    assert written["memory"].pop("host") == written["memory"].pop("host_usable") == 0
    assert written.pop("checksum")
    assert written == values


def test_a_plan_as_it_was_written_loads_whatever_is_known_of_its_hardware(sharded_plan, tmp_path):
    """Later versions may know the memory of a generation better; numbers may be written as another program does."""
    values = json.loads(json.dumps(sharded_plan.to_json()))
    values["cost"]["step_seconds"] = values["hardware"]["hbm_gib"] = 30.0
    path = tmp_path / "plan.json"
    Plan.from_json(values).save(str(path))
    path.write_text(path.read_text().replace("30.0", "30"))
    assert Plan.load(str(path)).hardware.hbm_gib == 30.0


def test_reasons_may_be_edited(sharded_plan, tmp_path):
    values = {**sharded_plan.to_json(), "versions": {}}
    values["search"]["reasons"].append("approved")
    (tmp_path / "plan.json").write_text(json.dumps(values))
    assert Plan.load(str(tmp_path / "plan.json")).search.reasons[-1] == "approved"


@pytest.mark.slow
@pytest.mark.parametrize("names_class", [True, False])
def test_a_plan_names_the_class_of_its_model(golden, make_config, tmp_path, names_class, raises_message):
    """Plans of earlier versions name none, and were made for Levanter's classes."""
    path = tmp_path / "plan.json"
    model_class = None if names_class else LEVANTER
    plan = make_plan(make_config(model_config=golden / "llama" / "config.json", model_levanter_class=model_class))
    values = plan.to_json()
    assert values["model"]["levanter_class"] == (DECODER if names_class else LEVANTER_CLASSES["llama"])
    if not names_class:
        values["model"]["levanter_class"] = None
    del values["checksum"]
    path.write_text(json.dumps(values), encoding="utf-8")
    config, given = load_given_plan(parse_config([f"--plan={path}"]))
    model = model_from_config(config)
    check_model(given, model)
    assert model.is_decoder == names_class
    other = LEVANTER if names_class else DECODER
    with raises_message(ConfigError):
        load_given_plan(parse_config([f"--plan={path}", f"--model.levanter_class={other}"]))
