"""Pins and prohibitions, as text and in plans."""

import pytest

from shardplan.cost.collectives import Purpose
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.explain.why_not import why_not
from shardplan.model.inspect import inspect_model
from shardplan.plan.pins import Rule, Rules, parse_rules
from shardplan.search.make_plan import make_plan

ATTENTION_CAUSES = (Purpose.HEADS_TO_POSITIONS.value, Purpose.RING.value)


def test_rules_are_parsed(llama_model):
    axes = inspect_model(llama_model)
    rules = parse_rules(["mlp=model", "params.embed=data+replica", "position="], ["vocab"], axes)
    assert rules.pins == (
        Rule("mlp", False, ("model",)), Rule("embed", True, ("data", "replica")), Rule("position", False, ())
    )  # fmt: skip
    assert rules.forbidden == (Rule("vocab", False, None),)
    assert rules.options("mlp", False, [(), ("data",)]) == [("model",)]
    assert rules.options("vocab", False, [(), ("model",)]) == [()]
    assert rules.options("vocab", True, [(), ("model",)]) == [(), ("model",)]


def test_some_mesh_axes_can_be_forbidden():
    rules = Rules(forbidden=(Rule("mlp", True, ("replica",)),))
    assert rules.options("mlp", True, [(), ("data",), ("data", "replica")]) == [(), ("data",)]


def test_a_tensor_can_be_pinned(llama_model):
    pins = parse_rules(["q_proj.weight:kv_head=model,embed=data"], [], inspect_model(llama_model)).pins
    assert {(pin.axis, pin.mesh_axes) for pin in pins if pin.mesh_axes} == {
        ("kv_head", ("model",)),
        ("embed", ("data",)),
    }
    assert {pin.axis for pin in pins if not pin.mesh_axes} == {"layers", "q_heads_per_group", "head_size"}
    assert all(pin.is_stored for pin in pins)


@pytest.mark.parametrize(
    ("pins", "forbidden", "message"),
    [
        (["mpl=model"], [], "pin 'mpl=model': the model has no axis 'mpl'; did you mean 'mlp'?"),
        (["mlp=modle"], [], "pin 'mlp=modle': unknown mesh axis 'modle'; did you mean 'model'?"),
        (["mlp"], [], "pin 'mlp' has no '=' after mlp: write mlp=model to shard it, mlp= to replicate it"),
        ([], ["heds"], "forbid 'heds': the model has no axis 'heds'; did you mean 'heads'?"),
        (
            ["q_prj.weight:embed=data"],
            [],
            "pin 'q_prj.weight:embed=data': no parameter is called 'q_prj.weight'; did you mean 'q_proj.weight'?",
        ),
        (
            ["params.embed"],
            [],
            "pin 'params.embed' has no '=' after params.embed: write params.embed=model to shard it, params.embed= to",
        ),
        (
            ["self_atn.qproj.weight:embed=data"],
            [],
            "no parameter is called 'self_atn.qproj.weight'; did you mean 'self_attn.q_proj.weight'?",
        ),
        (["q_proj.weight:mlp=data"], [], "pin 'q_proj.weight:mlp=data': q_proj.weight has no axis 'mlp'; valid: "),
        (["weight:embed=data"], [], "which have different axes; write more of the path"),
        (["mlp=model", "mlp="], [], "pins 'mlp=model' and 'mlp=' contradict each other on mlp; keep one"),
        (
            ["mlp=model+replica"],
            ["mlp=replica"],
            "pin 'mlp=model+replica' sets mlp=model+replica, which forbid mlp=replica excludes",
        ),
        (
            ["q_proj.weight:embed=data"],
            ["params.embed"],
            "pin 'q_proj.weight:embed=data' sets params.embed=data, which forbid params.embed excludes",
        ),
        (["mesh.modle=8"], [], "pin 'mesh.modle=8': unknown mesh axis 'modle'; did you mean 'model'?"),
        ([], ["mesh.model"], "forbid 'mesh.model' has no number of devices; write for example mesh.model=8"),
        (
            ["mesh.model=8"],
            ["mesh.model=8"],
            "pin 'mesh.model=8' sets mesh.model=8, which forbid mesh.model=8 excludes",
        ),
        (["mlp=model+model"], [], "pin 'mlp=model+model' names mesh axis 'model' twice; leave one out"),
        (["params.batch=data"], [], "pin 'params.batch=data': the model has no axis 'batch'"),
    ],
)
def test_unusable_rules_are_refused(llama_model, pins, forbidden, message):
    with pytest.raises(ConfigError) as raised:
        parse_rules(pins, forbidden, inspect_model(llama_model))
    assert message in str(raised.value)


@pytest.mark.slow
def test_plans_keep_to_rules(llama_model, llama_config):
    free = make_plan(llama_config(), llama_model)
    pinned = make_plan(
        llama_config(pin=("mlp=model", "params.vocab=model+data", "batch=data"), mesh_model=2), llama_model
    )
    assert pinned.compute_mapping["mlp"] == ["model"] and pinned.param_mapping["vocab"] == ["model", "data"]
    assert pinned.compute_mapping["batch"] == ["data"]
    assert pinned.cost.step_seconds >= free.cost.step_seconds
    without = make_plan(llama_config(forbid=("mlp", "params.embed")), llama_model)
    assert "mlp" not in without.compute_mapping and "embed" not in without.param_mapping


@pytest.mark.slow
def test_meshes_and_tensors_can_be_forbidden(llama_model, llama_config):
    free = make_plan(llama_config(), llama_model)
    other = make_plan(llama_config(forbid=(f"mesh.model={free.mesh['model']}",)), llama_model)
    assert other.mesh["model"] != free.mesh["model"]
    assert make_plan(llama_config(pin=("mesh.model=8",)), llama_model).mesh["model"] == 8
    assert why_not("mesh.model=8", free, llama_config(mesh_model=2), llama_model).plan.mesh["model"] == 8
    unsharded = make_plan(llama_config(forbid=("down_proj.weight:mlp",), mesh_model=1), llama_model)
    assert "mlp" not in unsharded.param_mapping


def test_a_pin_to_a_mesh_axis_of_one_device_is_infeasible(llama_model, llama_config, raises_message):
    with raises_message(InfeasibleError):
        make_plan(llama_config(pin=("mlp=model",), mesh_model=1), llama_model)


@pytest.mark.slow
def test_positions_can_be_pinned_to_several_mesh_axes(llama_model, llama_config):
    """Also in training, where keys are gathered; of three mesh axes Ulysses uses the last, the ring the other two."""
    pins = ("position=replica+data", "mesh.replica=2", "mesh.data=4")
    training = make_plan(llama_config(pin=pins, workload_kind="train"))
    assert (training.attention.strategy, training.attention.ring) == ("all_gather", 8)
    plan = make_plan(llama_config(pin=("position=replica+data+model", "mesh.replica=4", "mesh.data=4")), llama_model)
    assert (plan.attention.ulysses, plan.attention.ring) == (2, 16)
    of_attention = {c.kind: c.mesh_axes for c in plan.cost.collectives if c.cause in ATTENTION_CAUSES}
    assert of_attention == {"all-to-all": ["model"], "collective-permute": ["replica", "data"]}


def test_contradicting_pins_are_infeasible(llama_model, llama_config, raises_message):
    with pytest.raises(InfeasibleError) as raised:
        make_plan(llama_config(pin=("mlp=model", "kv_head=model", "head_size=model")), llama_model)
    assert "no mapping on v4-64 satisfies pin mlp=model kv_head=model head_size=model: every " in str(raised.value)
    with raises_message(InfeasibleError):
        make_plan(llama_config(pin=("kv_head=model", "head_size=model"), forbid=("vocab",)), llama_model)
    with raises_message(InfeasibleError):
        make_plan(llama_config(forbid=("mesh.model=1",), mesh_model=1), llama_model)
    with raises_message(ConfigError):
        make_plan(llama_config(pin=("mesh.model=4",), mesh_model=2), llama_model)


@pytest.mark.slow
def test_pins_that_allow_no_storage_sharding_are_infeasible(llama_model, llama_config, raises_message):
    with raises_message(InfeasibleError):
        make_plan(llama_config(pin=("params.mlp=data", "params.embed=data")), llama_model)


@pytest.mark.parametrize(("kind", "axis"), [("eval", "layers"), ("train", "layer")])
def test_axes_that_plans_never_shard_cannot_be_pinned(llama_config, kind, axis, raises_message):
    """Whatever the class that computes the model calls them."""
    with raises_message(ConfigError):
        make_plan(llama_config(pin=(f"params.{axis}=data",), workload_kind=kind))
