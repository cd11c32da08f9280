"""The cases that a command line selects for the compiler; nothing is compiled."""

import ast
import json
from pathlib import Path

import pytest

import shardplan
from shardplan.config import parse_config
from shardplan.config.command_flags import VerifyCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.errors import ConfigError
from shardplan.search.make_plan import make_plan
from shardplan.search.result.compiler_options import CURATED, TILE_MEMORY
from shardplan.verify.cache import CODE, DECODER_CODE, EXPERT_CODE, SEQUENCE_CODE, normalize_code
from shardplan.verify.select_cases import build_cases

LLAMA = ["--model.config=llama-3.1-8b", "--hardware.slice=v5p-16", "--workload.position=1024"]


def load(*arguments):
    return parse_config([*LLAMA, *arguments], VerifyCommand)


def cases_from(*arguments):
    config = load(*arguments)
    return build_cases(config, config.options, config.against)


@pytest.mark.slow
def test_every_set_of_options_and_every_comparison_is_a_case(tmp_path):
    """A plan file, a configuration and a Levanter trainer keep their own batch and take the program of this one."""
    make_plan(load("--workload.batch=16")).save(str(tmp_path / "plan.json"))
    (tmp_path / "other.yaml").write_text(
        "model: {config: llama-3.1-8b}\nhardware: {slice: v4-16}\nworkload: {batch: 24}\n"
    )
    trainer = {"train_batch_size": 32, "mp": "p=f32,c=bf16", "mesh": {"axes": {"model": 4}}}
    (tmp_path / "levanter.yaml").write_text(json.dumps({"trainer": trainer}))
    against = [str(tmp_path / name) for name in ("plan.json", "other.yaml", "levanter.yaml")]
    cases = cases_from("--options=auto", "--compiler.program=load", "--against", *against)
    own = cases[0].options  # with larger tiles, which no curated set has
    assert TILE_MEMORY in own and [case.options for case in cases[:-3]] == [own, *CURATED.values()]
    assert [case.label for case in cases[-3:]] == against
    assert [case.plan.workload.batch for case in cases] == [8] * (1 + len(CURATED)) + [16, 24, 32]
    assert [case.plan.hardware.slice for case in cases[-3:]] == ["v5p-16", "v4-16", "v5p-16"]
    assert {case.program for case in cases} == {"load"}
    hand_written = cases[-1].plan
    assert hand_written.mesh == {"replica": 1, "data": 2, "model": 4}
    assert hand_written.compute_mapping["mlp"] == ["model"] and hand_written.param_mapping["embed"] == ["data"]
    assert hand_written.workload.param_dtype == "float32" and hand_written.workload.position == 1024


@pytest.mark.slow
def test_axes_that_the_model_does_not_have_are_named(tmp_path):
    (tmp_path / "levanter.yaml").write_text(
        json.dumps({"trainer": {"mesh": {"shared_mapping": {"kv_heads": "model"}}}})
    )
    (_, case) = cases_from("--against", str(tmp_path / "levanter.yaml"))
    assert "the model has no axis 'kv_heads', so that mapping it does nothing; did you mean 'kv_head'?" in (
        case.plan.search.reasons
    )


@pytest.mark.slow
def test_a_layout_that_jax_refuses_is_a_case(tmp_path):
    """Heads over more devices than there are heads, on the mesh axis of their group: the compiler's verdict says so."""
    axes = dict.fromkeys(("kv_head", "q_heads_per_group"), "model")
    mesh = {"axes": {"data": 1, "model": 16}, "shared_mapping": axes}
    (tmp_path / "levanter.yaml").write_text(json.dumps({"trainer": {"train_batch_size": 32, "mesh": mesh}}))
    case = cases_from("--hardware.slice=v5p-32", "--against", str(tmp_path / "levanter.yaml"))[-1]
    assert case.plan.compute_mapping["kv_head"] == case.plan.compute_mapping["q_heads_per_group"] == ["model"]


@pytest.mark.slow
def test_a_plan_alone_is_a_complete_configuration(tmp_path, raises_message):
    """Slice, mesh, workload and model come from the plan; a setting that contradicts the plan is refused."""
    path = str(tmp_path / "plan.json")
    plan = make_plan(load("--workload.batch=16", "--workload.kind=train"))
    plan.save(path)
    config, given = load_given_plan(parse_config([f"--plan={path}"]))
    assert given == plan
    assert (config.hardware.slice, config.workload.batch, config.workload.kind) == ("v5p-16", 16, "train")
    assert config.model.config == "llama-3.1-8b"
    assert make_plan(config).param_mapping == plan.param_mapping
    with raises_message(ConfigError):
        load_given_plan(parse_config([f"--plan={path}", "--workload.batch=24"]))


def test_normalized_code_has_no_comments_docstrings_and_imports():
    code = '"""Text."""\nfrom a import b\n\ndef f(x):\n    """Text."""\n    return b(x) + 1  # why\n'
    same = "from c import b\ndef f(x):\n    return b( x ) + 1\n"
    assert normalize_code(code) == normalize_code(same)
    assert normalize_code(code) != normalize_code(same.replace("1", "2"))


@pytest.mark.parametrize("pattern", [*CODE, *SEQUENCE_CODE, *DECODER_CODE, *EXPERT_CODE])
def test_modules_that_decide_a_compile_exist(pattern):
    """A renamed module would otherwise no longer be a part of the digest that names a cached result."""
    assert list(Path(shardplan.__file__).parent.glob(f"{pattern}.py"))


READ_BEFORE = {
    "axes", "bundled_configs", "huggingface/checked_keys", "huggingface/foreign_keys", "huggingface/model_types",
    "huggingface/support", "huggingface/text_part", "model_class", "own_model",
}  # fmt: skip
"""Modules of shardplan/model that check or find what is in the digest itself: config.json and a model's own code."""


def test_the_digest_has_every_module_of_models_that_programs_are_made_by():
    """A verdict of other code would be read from the cache otherwise."""
    package = Path(shardplan.__file__).parent
    patterns = (*CODE, *SEQUENCE_CODE, *DECODER_CODE, *EXPERT_CODE)
    digested = {path for pattern in patterns for path in package.glob(f"{pattern}.py")}
    imported = set[Path]()
    for path in digested:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardplan.model"):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                imported.update(package.parent / f"{module.replace('.', '/')}.py" for module in modules)
    missing = {path for path in imported - digested if path.exists()}
    assert {path.relative_to(package / "model").with_suffix("").as_posix() for path in missing} == READ_BEFORE
