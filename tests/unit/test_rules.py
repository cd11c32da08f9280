"""Pins and what is forbidden, as text and in plans; why a plan does not make a choice; what other settings change."""

import dataclasses

import pytest

from shardplan.errors import ConfigError, InfeasibleError
from shardplan.explain.what_if import what_if
from shardplan.explain.why_not import why_not
from shardplan.model import build_model, inspect_model, read_config
from shardplan.plan.pins import Rule, Rules, parse_rules
from shardplan.search.make_plan import NO_KERNEL, make_plan

ATTENTION_CAUSES = ("heads exchanged for positions", "keys and values going round")
LLAMA = "configs/models/llama-3.1-8b.json"


@pytest.fixture(scope="module")
def model():
    return build_model(read_config(LLAMA, None), 4096)


@pytest.fixture
def config(make_config):
    def make(pin=(), forbid=(), **overrides):
        settings = {"model_config": LLAMA, "hardware_slice": "v4-64", "workload_batch": 8, "workload_position": 4096}
        return dataclasses.replace(make_config(**{**settings, **overrides}), pin=pin, forbid=forbid)

    return make


def test_rules_are_read(model):
    axes = inspect_model(model)
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


def test_a_tensor_can_be_pinned(model):
    pins = parse_rules(["q_proj.weight:kv_head=model,embed=data"], [], inspect_model(model)).pins
    assert {(pin.axis, pin.mesh_axes) for pin in pins if pin.mesh_axes} == {
        ("kv_head", ("model",)),
        ("embed", ("data",)),
    }
    assert {pin.axis for pin in pins if not pin.mesh_axes} == {"layer", "q_heads_per_group", "head_size"}
    assert all(pin.at_rest for pin in pins)


@pytest.mark.parametrize(
    ("pins", "forbidden", "message"),
    [
        (["mpl=model"], [], "pin 'mpl=model': the model has no axis 'mpl'; did you mean 'mlp'?"),
        (["mlp=modle"], [], "pin 'mlp=modle': unknown mesh axis 'modle'; did you mean 'model'?"),
        (["mlp"], [], "pin 'mlp': say to what, as in mlp=model, or mlp= for whole"),
        ([], ["heds"], "forbid 'heds': the model has no axis 'heds'; did you mean 'heads'?"),
        (
            ["q_prj.weight:embed=data"],
            [],
            "pin 'q_prj.weight:embed=data': no parameter is called 'q_prj.weight'",
        ),
        (["q_proj.weight:mlp=data"], [], "pin 'q_proj.weight:mlp=data': q_proj.weight has no axis 'mlp'; valid: "),
        (["weight:embed=data"], [], "which have different axes; say which"),
        (["mlp=model", "mlp="], [], "pins 'mlp=model' and 'mlp=' want mlp in two ways; keep one"),
        (
            ["mlp=model+replica"],
            ["mlp=replica"],
            "pin 'mlp=model+replica' has mlp=model+replica, and forbid mlp=replica excludes that",
        ),
        (
            ["q_proj.weight:embed=data"],
            ["params.embed"],
            "pin 'q_proj.weight:embed=data' has params.embed=data, and forbid params.embed excludes that",
        ),
        (["mesh.modle=8"], [], "pin 'mesh.modle=8': unknown mesh axis 'modle'; did you mean 'model'?"),
        ([], ["mesh.model"], "forbid 'mesh.model': say how many devices, as in mesh.model=8"),
        (["mesh.model=8"], ["mesh.model=8"], "pin 'mesh.model=8' has mesh.model=8, and forbid mesh.model=8 excludes"),
        (["params.batch=data"], [], "pin 'params.batch=data': the model has no axis 'batch'"),
    ],
)
def test_rules_that_cannot_be_read(model, pins, forbidden, message):
    with pytest.raises(ConfigError) as raised:
        parse_rules(pins, forbidden, inspect_model(model))
    assert message in str(raised.value)


def test_plans_keep_to_rules(model, config):
    free = make_plan(config(), model)
    pinned = make_plan(config(pin=("mlp=model", "params.vocab=model+data", "batch=data"), mesh_model=2), model)
    assert pinned.compute_mapping["mlp"] == ["model"] and pinned.param_mapping["vocab"] == ["model", "data"]
    assert pinned.compute_mapping["batch"] == ["data"]
    assert pinned.cost.step_seconds >= free.cost.step_seconds
    without = make_plan(config(forbid=("mlp", "params.embed")), model)
    assert "mlp" not in without.compute_mapping and "embed" not in without.param_mapping


def test_meshes_and_tensors_can_be_forbidden(model, config):
    free = make_plan(config(), model)
    other = make_plan(config(forbid=(f"mesh.model={free.mesh['model']}",)), model)
    assert other.mesh["model"] != free.mesh["model"]
    assert make_plan(config(pin=("mesh.model=8",)), model).mesh["model"] == 8
    assert why_not("mesh.model=8", free, config(mesh_model=2), model).plan.mesh["model"] == 8
    whole = make_plan(config(forbid=("down_proj.weight:mlp",), mesh_model=1), model)
    assert "mlp" not in whole.param_mapping


def test_a_pin_that_the_mesh_has_no_devices_for(model, config):
    with pytest.raises(InfeasibleError, match="mlp=model needs a mesh with model larger than 1"):
        make_plan(config(pin=("mlp=model",), mesh_model=1), model)


def test_positions_can_be_pinned_to_several_mesh_axes(model, config):
    """In training too, where keys are gathered; of three mesh axes the last is for heads, and a ring goes round two."""
    pins = ("position=replica+data", "mesh.replica=2", "mesh.data=4")
    training = make_plan(config(pin=pins, workload_kind="train"), model)
    assert (training.attention.strategy, training.attention.ring) == ("all_gather", 8)
    plan = make_plan(config(pin=("position=replica+data+model", "mesh.replica=4", "mesh.data=4")), model)
    assert (plan.attention.ulysses, plan.attention.ring) == (2, 16)
    of_attention = {c.kind: c.mesh_axes for c in plan.cost.collectives if c.cause in ATTENTION_CAUSES}
    assert of_attention == {"all-to-all": ["model"], "collective-permute": ["replica", "data"]}


def test_pins_that_contradict_each_other(model, config):
    with pytest.raises(InfeasibleError) as raised:
        make_plan(config(pin=("mlp=model", "kv_head=model", "head_size=model")), model)
    assert "no mapping on v4-64 keeps to pin mlp=model kv_head=model head_size=model" in str(raised.value)
    with pytest.raises(ConfigError, match=r"mesh\.model is 2, and pin mesh\.model=4 wants another; leave one out"):
        make_plan(config(pin=("mesh.model=4",), mesh_model=2), model)


def test_pins_that_leave_no_way_to_rest(model, config):
    with pytest.raises(InfeasibleError, match=r"no mapping on v4-64 keeps to pin params\.mlp=data params\.embed=data"):
        make_plan(config(pin=("params.mlp=data", "params.embed=data")), model)


def test_what_plans_never_cut_cannot_be_pinned(model, config):
    with pytest.raises(ConfigError, match=r"pin params\.layer=data: layers are stacked along layer"):
        make_plan(config(pin=("params.layer=data",)), model)


def test_why_not(model, config):
    settings = config()
    plan = make_plan(settings, model)
    slower = why_not("position=", plan, settings, model)
    assert slower.plan.cost.step_seconds > plan.cost.step_seconds and not slower.obstacle
    assert next(iter(slower.seconds)).startswith("all-reduce, partial sums of ") and slower.seconds["compute"] > 0
    assert why_not("kv_head=data", plan, config(pin=("head_size=data", "batch=")), model).plan is None
    assert not why_not("position=replica", plan, settings, model).obstacle
    assert why_not("q_heads_per_group=replica", plan, settings, model).obstacle == NO_KERNEL
    # the user's own pin does not stand in the way of the question
    pinned = config(pin=("mlp=model",))
    answer = why_not("mlp=", make_plan(pinned, model), pinned, model)
    assert answer.instead == ["mlp=model"] and "mlp" not in answer.plan.compute_mapping


def test_what_if_something_fits(model, config):
    variants = {variant.change: variant.plan for variant in what_if(config(), model)}
    assert list(variants) == [
        "as it is", "workload.batch 4", "workload.batch 16", "hardware.slice v4-32", "hardware.slice v4-128",
        "workload.param_dtype float32",
    ]  # fmt: skip
    assert all(variants.values())
    assert variants["hardware.slice v4-128"].cost.step_seconds < variants["as it is"].cost.step_seconds


def test_what_if_nothing_fits(model, config):
    """As much of a change as it takes, and no more."""
    variants = what_if(config(hardware_slice="v5e-4", workload_kind="train"), model)
    fits = {variant.change: variant.plan is not None for variant in variants}
    assert not fits["as it is"] and "lacking" in variants[0].why_not
    slices = [change for change in fits if change.startswith("hardware.slice")]
    assert [fits[change] for change in slices] == [False] * (len(slices) - 1) + [True]


@pytest.mark.parametrize("batch", [16, pytest.param(240, marks=pytest.mark.whole)])
def test_microbatches_can_be_chosen(model, config, batch):
    """The fastest of every number of them, each planned by itself, also where divisors do not divide each other."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_batch": batch, "mesh_replica": 1}
    plan = make_plan(config(workload_microbatches="null", **settings), model)
    seconds = {}
    for n in (n for n in range(1, batch + 1) if batch % n == 0):
        try:
            seconds[n] = make_plan(config(workload_microbatches=n, **settings), model).cost.step_seconds
        except InfeasibleError as error:
            assert "lacking" in str(error)
    assert plan.cost.step_seconds == min(seconds.values()) == seconds[plan.workload.microbatches]


def test_a_number_of_microbatches_that_shares_evenly_is_found(model, config):
    """144 sequences in 2 parts cannot be shared by 16 groups of devices, in 3 they can."""
    settings = {"hardware_slice": "v5e-16", "workload_kind": "train", "workload_batch": 144, "mesh_data": 16}
    plan = make_plan(config(pin=("batch=data",), workload_microbatches="null", **settings), model)
    assert plan.workload.microbatches == 3


def test_no_number_of_microbatches_fits(model, config):
    with pytest.raises(InfeasibleError, match="the nearest miss, mesh"):
        make_plan(config(hardware_slice="v5e-4", workload_kind="train", workload_microbatches="null"), model)


def test_checkpointing_can_be_chosen(model, config):
    roomy = make_plan(
        config(hardware_slice="v5p-64", workload_kind="train", workload_gradient_checkpointing="auto"), model
    )
    tight = make_plan(
        config(hardware_slice="v5e-16", workload_kind="train", workload_gradient_checkpointing="auto"), model
    )
    assert roomy.workload.gradient_checkpointing == "save_all"
    assert tight.workload.gradient_checkpointing != "save_all"
