"""`expressible`: plans that the flat schema of Levanter's trainer section can express, and what rules them out."""

import pytest
from conftest import run

from shardplan.config import parse_config
from shardplan.errors import InfeasibleError
from shardplan.explain.why_not import why_not
from shardplan.hardware import parse_slice
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.levanter_config.writer import flat_trainer_section, yaml_limitations
from shardplan.search.make_plan import make_plan
from shardplan.search.reasons import EXPRESSIBLE


def config_of(model, *arguments):
    return parse_config([f"--model.config={model}", *arguments])


@pytest.mark.parametrize(
    ("model", "arguments", "is_limited"),
    [
        ("llama-3.1-8b", ["--hardware.slice=v4-64", "--workload.position=4096"], True),
        ("llama-3.1-8b", ["--hardware.slice=v4-64", "--workload.kind=prefill", "--workload.batch=1"], True),
        pytest.param("gemma-7b", ["--hardware.slice=v5e-16", "--workload.batch=4"], True, marks=pytest.mark.whole),
        pytest.param("mixtral-8x7b", ["--hardware.slice=v4-16"], False, marks=pytest.mark.whole),
        ("mistral-7b-v0.3", ["--hardware.slice=2xv5e-16", "--workload.batch=64"], False),
        ("llama-3.1-8b", ["--hardware.slice=v5p-16", "--workload.kind=train", "--workload.batch=16"], False),
    ],
)
def test_yaml_expresses_every_plan(model, arguments, is_limited):
    """Where it expresses the plan without the switch, too, the two are the same."""
    free = make_plan(config_of(model, *arguments))
    plan = make_plan(config_of(model, *arguments, "--expressible"))
    assert bool(yaml_limitations(free)) == is_limited
    assert not yaml_limitations(plan)
    (reason,) = (reason for reason in plan.search.reasons if EXPRESSIBLE in reason)
    assert not any(EXPRESSIBLE in reason for reason in free.search.reasons)
    if is_limited:
        slower = plan.cost.step_seconds / free.cost.step_seconds - 1
        assert slower > 0 and reason == f"{EXPRESSIBLE}; {slower:.1%} slower than the fastest without this"
    else:
        assert reason == f"{EXPRESSIBLE}; which costs no time"
        assert (plan.mesh, plan.compute_mapping) == (free.mesh, free.compute_mapping)
        assert (plan.param_mapping, plan.cost, plan.memory) == (free.param_mapping, free.cost, free.memory)
    slices = parse_slice(plan.hardware.slice).slices
    section = parse_trainer_section(flat_trainer_section(plan), plan.hardware.devices, slices)
    assert section.mesh == plan.mesh
    sharded = {axis: axes for axis, axes in section.compute_mapping.items() if axis != "batch"}
    assert sharded == {axis: axes for axis, axes in plan.compute_mapping.items() if axis != "batch"}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            ["mlp=model+replica"],
            "expressible and pin mlp=model+replica: Levanter's YAML cannot express mlp=model+rep",
        ),
        (["params.mlp=replica+data"], "Levanter's YAML cannot express params.mlp=replica+data"),
        (["position=data"], "Levanter's YAML cannot express position=data"),
        (["batch=replica", "mesh.data=4"], "Levanter's YAML cannot express batch=replica"),
    ],
)
def test_pins_that_yaml_cannot_express(llama_model, pins, message):
    config = config_of("llama-3.1-8b", "--hardware.slice=v4-64", "--expressible", "--pin", *pins)
    with pytest.raises(InfeasibleError) as raised:
        make_plan(config, llama_model)
    assert str(raised.value).startswith("no mapping on v4-64 satisfies expressible and pin ")
    assert message in str(raised.value)
    free = config_of("llama-3.1-8b", "--hardware.slice=v4-64", "--expressible")
    answer = why_not(pins[0], make_plan(free, llama_model), free, llama_model)
    assert answer.plan is None or pins[0].startswith("batch")


def test_a_batch_that_yaml_cannot_shard(llama_model):
    arguments = ["--hardware.slice=v4-64", "--expressible", "--mesh.data=8", "--workload.batch=3"]
    with pytest.raises(InfeasibleError, match=r"satisfies expressible: batch \(3\) is not divisible by .*data = "):
        make_plan(config_of("llama-3.1-8b", *arguments), llama_model)


def test_commands_take_the_switch(tmp_path):
    argv = ["--model.config=llama-3.1-8b", "--hardware.slice=v4-64"]
    path = tmp_path / "plan.json"
    done = run("eval", *argv, "--expressible", "--dry_run", "--json", path)
    assert done.returncode == 0, done.stderr
    assert "only plans that Levanter's flat schema can express" in " ".join(done.stdout.split())
    done = run("verify", *argv, "--expressible", "--plan", path)
    assert done.returncode == 2
    assert f"expressible is for planning, and plan {path} is given; leave one of the two out" in done.stderr
