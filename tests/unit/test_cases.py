"""What a command line asks the compiler; nothing is compiled."""

import json

import pytest

from shardplan import config as configuration
from shardplan.errors import ConfigError
from shardplan.plan.compiler_options import CURATED
from shardplan.search.make_plan import make_plan, with_plan
from shardplan.verify.cases import cases_of
from shardplan.verify.run import _meaning

LLAMA = ["--model.config=configs/models/llama-3.1-8b.json", "--hardware.slice=v5p-16", "--workload.position=1024"]


def load(*arguments):
    return configuration.load([*LLAMA, *arguments], "test")


def test_options_are_tried_beside_what_is_compared(tmp_path):
    """A plan file, a configuration, and a Levanter trainer: each with its own batch, all with this program."""
    make_plan(load("--workload.batch=16")).save(str(tmp_path / "plan.json"))
    (tmp_path / "other.yaml").write_text(
        "model: {config: configs/models/llama-3.1-8b.json}\nhardware: {slice: v4-16}\nworkload: {batch: 24}\n"
    )
    trainer = {"model_axis_size": 4, "train_batch_size": 32, "mp": "p=f32,c=bf16", "axis_resources": {"mlp": "model"}}
    (tmp_path / "levanter.yaml").write_text(json.dumps({"trainer": trainer}))
    against = [str(tmp_path / name) for name in ("plan.json", "other.yaml", "levanter.yaml")]
    cases = cases_of(load("--options=auto", "--compiler.program=load", "--against", *against))
    assert [case.options for case in cases[:-3]] == list(CURATED.values())
    assert [case.label for case in cases[-3:]] == against
    assert [case.plan.workload.batch for case in cases] == [8] * len(CURATED) + [16, 24, 32]
    assert [case.plan.hardware.slice for case in cases[-3:]] == ["v5p-16", "v4-16", "v5p-16"]
    assert {case.program for case in cases} == {"load"}
    hand_written = cases[-1].plan
    assert hand_written.mesh == {"replica": 1, "data": 2, "model": 4}
    assert hand_written.compute_mapping["mlp"] == ["model"] and hand_written.param_mapping["embed"] == ["data"]
    assert hand_written.workload.param_dtype == "float32" and hand_written.workload.position == 1024


def test_axes_that_the_model_does_not_have_are_named(tmp_path):
    (tmp_path / "levanter.yaml").write_text(json.dumps({"trainer": {"axis_resources": {"kv_heads": "model"}}}))
    (_, case) = cases_of(load("--against", str(tmp_path / "levanter.yaml")))
    assert "the model has no axis 'kv_heads', so that mapping it does nothing; did you mean 'kv_head'?" in (
        case.plan.search.reasons
    )


def test_a_plan_alone_says_everything(tmp_path):
    """Slice, mesh, workload and model come from the plan; what contradicts it is refused."""
    path = str(tmp_path / "plan.json")
    plan = make_plan(load("--workload.batch=16", "--workload.kind=train"))
    plan.save(path)
    config, given = with_plan(configuration.load([f"--plan={path}"], "test"))
    assert given == plan
    assert (config.hardware.slice, config.workload.batch, config.workload.kind) == ("v5p-16", 16, "train")
    assert config.model.config == "configs/models/llama-3.1-8b.json"
    assert make_plan(config).param_mapping == plan.param_mapping
    with pytest.raises(ConfigError, match=r"workload.batch is 24, plan .* has 16; leave it out, or plan again"):
        with_plan(configuration.load([f"--plan={path}", "--workload.batch=24"], "test"))


def test_a_verdict_holds_until_the_code_means_something_else():
    code = '"""Text."""\nfrom a import b\n\ndef f(x):\n    """Text."""\n    return b(x) + 1  # why\n'
    same = "from c import b\ndef f(x):\n    return b( x ) + 1\n"
    assert _meaning(code) == _meaning(same)
    assert _meaning(code) != _meaning(same.replace("1", "2"))
