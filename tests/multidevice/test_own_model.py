"""A model that is in no registry is planned, loaded, evaluated and compiled, by the name of its class alone."""

import dataclasses
import json
import os

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, fails, run, start, word_tokenizer
from haliax.state_dict import to_torch_compatible_state_dict
from jax.sharding import NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask
from parallel_model import ParallelConfig, ParallelModel
from safetensors.numpy import save_file

from shardplan import load_config, load_pretrained, make_plan
from shardplan.execution import planned_attention
from shardplan.execution.device_mesh import make_mesh
from shardplan.execution.specialize import specialize
from shardplan.execution.step_program import step_program
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.own_model import own_code
from shardplan.model.registry import transformers_config
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.search.make_plan import model_from_config

CLASS = "parallel_model:ParallelConfig"
SIZES = {"width": 64, "depth": 2, "groups": 4, "queries": 2, "head_width": 16, "ffn": 192, "positions": 128}
CONFIG = {"model_type": "parallel", "vocab_size": 256, "attention_bias": "ours", **SIZES}
LENGTH = 32


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let the commands, which are processes of their own, import the class."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "notebooks"), str(ROOT)]))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A checkpoint of random weights with a tokenizer and text; the model that was saved; the tokens of the text."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = ParallelConfig.from_hf_config(transformers_config(CONFIG))
    model = ParallelModel.init(hax.Axis("vocab", 256), config, key=jax.random.PRNGKey(0))
    save_file(
        {n: np.asarray(v) for n, v in to_torch_compatible_state_dict(model).items()}, folder / "model.safetensors"
    )
    word_tokenizer(0).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokens = np.random.default_rng(0).integers(0, 256, (4, LENGTH))
    rows = [{"text": " ".join(f"t{token}" for token in row)} for row in tokens]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, model, tokens


def expected_losses(model, tokens):
    """float64[sequence, token], on one device and without a mesh."""
    batch = hax.named(jnp.asarray(tokens), ("batch", "position"))
    stream = model.activations(batch, AttentionMask.causal())
    logits = np.asarray(
        hax.dot(stream, model.head.weight, axis=model.Embed).rearrange(("batch", "position", "vocab")).array
    )
    shifted = logits.astype(np.float64)[:, :-1]
    normalised = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(normalised, tokens[:, 1:, None], -1)[..., 0]


def settings(folder, slice_name="cpu-8"):
    return {
        "model": {"ref": str(folder), "levanter_class": CLASS},
        "hardware": {"slice": slice_name},
        "workload": {"batch": 4, "position": LENGTH, "param_dtype": "float32", "compute_dtype": "float32"},
    }


def arguments(folder, slice_name="cpu-8"):
    sections = settings(folder, slice_name).items()
    return [f"--{section}.{key}={value}" for section, values in sections for key, value in values.items()]


def test_the_plan_is_exact_and_loaded(own):
    folder, model, _ = own
    config = load_config(**settings(folder), mesh={"model": 4})
    plan = make_plan(config)
    assert plan.model.type == "parallel" and plan.mesh["model"] == 4
    assert {"width", "group", "query", "head", "ffn", "vocab"} <= plan.model.axes.keys()
    assert "model" in [axis for axes in plan.compute_mapping.values() for axis in axes]
    loaded = load_pretrained(str(folder), plan=plan, config=model_from_config(config).config)
    specs = {p.path: PartitionSpec(*(tuple(axes) if axes else None for axes in p.spec)) for p in plan.parameters}
    expected = dict(named_leaves(model))
    for path, leaf in named_leaves(loaded):
        planned = NamedSharding(leaf.array.sharding.mesh, specs[path])
        assert leaf.array.sharding.is_equivalent_to(planned, leaf.array.ndim), path
        np.testing.assert_array_equal(np.asarray(leaf.array), np.asarray(expected[path].array), err_msg=path)


@pytest.mark.parametrize(
    "layout",
    [["--mesh.model=2"], ["--mesh.model=2", "--mesh.data=4", "--pin", "position=data"]],
    ids=["heads", "positions"],
)
def test_evaluation(own, tmp_path, layout):
    """The model calls Levanter's function of attention, which runs as the plan says where positions are sharded."""
    folder, model, tokens = own
    output = tmp_path / "results"
    argv = (*arguments(folder), f"--data.path={folder / 'text.jsonl'}", f"--output={output}", *layout)
    done = start("eval", *argv, "--quiet")
    assert done.returncode == 0, done.stderr
    texts = json.loads((output / "summary.json").read_text())["texts"]
    losses = [text["loss_per_token"] for text in texts.values()]
    np.testing.assert_allclose(losses, expected_losses(model, tokens).mean(1), rtol=1e-5)


def test_the_compiler_agrees_with_the_plan(own, forked_compiler):
    folder, _, _ = own
    done = run("verify", *arguments(folder, "v4-8"), "--compiler.cache=null", "--json=-")
    assert done.returncode == 0, done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert verdict["outcome"] == "fits"


def test_a_plan_file_names_the_class(own, tmp_path):
    """And a checkpoint does not: which code is imported is not for it to say."""
    folder, path = own[0], tmp_path / "plan.json"
    make_plan(load_config(**settings(folder))).save(str(path))
    done = run("checkpoint", "--schedule", f"--plan={path}")
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "attention_bias": None, "levanter_class": CLASS}))
    fails(run("plan", f"--model.config={tmp_path / 'config.json'}"), 2, "for your own model, set model.levanter_class")


def test_changed_code_is_compiled_again(own, tmp_path, monkeypatch):
    (tmp_path / "changing.py").write_text((ROOT / "notebooks" / "parallel_model.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    hf_config = read_config(str(own[0] / "config.json"), None, "changing:ParallelConfig")
    before = own_code(hf_config)
    (tmp_path / "changing.py").write_text("# changed")
    assert before is not None and own_code(hf_config) != before
    assert own_code(read_config("llama-3.1-8b", None)) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parallel_model", "model.levanter_class is 'parallel_model'; it must be package.module:Class"),
        ("paralel_model:X", "model.levanter_class 'paralel_model:X': cannot import paralel_model: "),
        ("parallel_model:ParalelConfig", "has no class 'ParalelConfig'; did you mean 'ParallelConfig'?"),
        ("parallel_model:Block", "Block has no from_hf_config, which makes it from a config.json"),
    ],
)
def test_names_that_are_no_class(own, name, message):
    argv = [argument for argument in arguments(own[0]) if "levanter_class" not in argument]
    fails(run("plan", *argv, f"--model.levanter_class={name}"), 2, message)


def test_without_the_name_the_error_says_what_to_do(own):
    argv = [argument for argument in arguments(own[0]) if "levanter_class" not in argument]
    (own[0] / "config.json").write_text(json.dumps({**CONFIG, "attention_bias": None}))
    fails(run("plan", *argv), 2, "for your own model, set model.levanter_class")


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_planned_methods_compute_the_attention_of_the_model(own, strategy, monkeypatch):
    """Every method for sharded positions is called, and gives the losses of one device."""
    folder, model, tokens = own
    config = load_config(**settings(folder), mesh={"data": 4, "model": 1, "replica": 2}, pin=["position=data"])
    plan = make_plan(config)
    ulysses = 4 if strategy == "ulysses" else 1
    plan = dataclasses.replace(plan, attention=AttentionPlan(strategy, ulysses, 4 // ulysses))
    calls = []
    original = planned_attention.sharded_attention
    monkeypatch.setattr(
        planned_attention,
        "sharded_attention",
        lambda *args, **kwargs: calls.append(kwargs["strategy"]) or original(*args, **kwargs),
    )
    planned = specialize(model_from_config(config), plan)
    mesh = make_mesh(plan)
    program = step_program(planned, plan, mesh)
    loaded = load_pretrained(str(folder), plan=plan, config=planned.config)
    like = program.arguments[1]
    inputs = []
    for values in (tokens.astype(np.int32), np.ones(tokens.shape, bool)):
        array = jax.make_array_from_callback(
            values.shape, like.array.sharding, lambda index, values=values: values[index]
        )
        inputs.append(hax.named(array, like.axes))
    losses = program.compile({})(loaded, *inputs)
    assert set(calls) == {strategy}
    np.testing.assert_allclose(np.asarray(losses.array)[:, :-1], expected_losses(model, tokens), rtol=1e-4)
