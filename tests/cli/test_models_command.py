"""`shardplan models`: which models are supported, and the facts of one."""

import json

import pytest
from conftest import fails, run
from transformers import Gemma3TextConfig

from shardplan.catalogue.model_types import Feature, sequence_methods, supported_features
from shardplan.catalogue.names import NamedModel, find_model
from shardplan.errors import ConfigError
from shardplan.model.bundled_configs import BUNDLED
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.model_types import OTHER_TYPES, SUPPORTED_TYPES
from shardplan.model.registry import Model, build_model

WIDTH = 80


@pytest.fixture(scope="module")
def overview(tmp_path_factory):
    """The table on a terminal of 80 columns, and the same as JSON."""
    path = tmp_path_factory.mktemp("models") / "models.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        done = run("models", "--json", path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def facts_of(name):
    """The facts of one model or type, as JSON."""
    done = run("models", name, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_types_and_released_models_are_listed(overview):
    text, values = overview
    assert {each["type"] for each in values["types"]} == set(SUPPORTED_TYPES)
    assert {name for each in values["types"] for name in each["released"]} == BUNDLED.keys()
    assert {name for each in values["refused"] for name in each["types"]} == OTHER_TYPES.keys()
    words = set(text.replace(",", " ").replace(":", " ").split())
    assert set(SUPPORTED_TYPES) | BUNDLED.keys() | OTHER_TYPES.keys() <= words


def test_the_overview_fits_80_columns_and_says_what_the_json_says(overview):
    text, values = overview
    assert max(map(len, text.splitlines())) <= WIDTH
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line.count("yes"))
    for each in values["types"]:
        shown = dict(zip([str(feature) for feature in Feature], rows[each["type"]].split(), strict=True))
        assert {name for name, answer in shown.items() if answer == "yes"} == set(each["features"])


def test_values_that_are_printed_as_the_only_ones_are(overview):
    """Any other value is refused, by the name of the key."""
    checked = 0
    for each in overview[1]["types"]:
        config = read_config(each["released"][0], None)
        for key, values in each["only"].items():
            other = not values[0] if isinstance(values[0], bool) else "other"
            with pytest.raises(ConfigError, match=key):
                build_model({**config, key: other}, 1)
            checked += 1
    assert checked > 20


def test_support_follows_from_what_planning_and_loading_ask(monkeypatch):
    model = build_model(read_config("gpt2", None), 1)
    assert set(supported_features(model)) == set(Feature)
    monkeypatch.setattr("shardplan.catalogue.model_types.expected_tensors", lambda _: {})
    monkeypatch.setattr(Model, "is_attention_planned", False)
    monkeypatch.setattr("shardplan.program.marked.attention_kind.AttentionKind.can_shard_positions", False)
    sequence_methods.cache_clear()
    assert set(supported_features(model)) == {Feature.PLAN, Feature.VERIFY}


def test_a_released_model():
    """Its windows are those that transformers reads of a config.json of 62 layers."""
    values = facts_of("gemma-3-27b")
    kinds = Gemma3TextConfig(num_hidden_layers=62).layer_types
    layers = {each["pattern"]["window"]: each["layers"] for each in values["model"]["layers"]}
    assert layers == {1024: kinds.count("sliding_attention"), None: kinds.count("full_attention")}
    assert values["model"]["parameters"] == pytest.approx(27.0e9, rel=0.001)
    assert values["model"]["positions"] == 131072 and values["type"]["type"] == "gemma3_text"
    assert values["model"]["config"] == json.loads(BUNDLED["gemma-3-27b"].read_text())
    assert values["refused"] is None


@pytest.mark.quick
def test_a_name_of_a_released_model_and_of_a_type(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    done = run("models", "gpt2")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and max(map(len, lines)) <= WIDTH
    facts = {line[:14].strip(): line[14:] for line in lines}
    assert facts["parameters"] == "124,439,808" and facts["layers"] == "12 x causal, head size 64"
    assert facts["model type"] == "gpt2" and facts["family"].startswith("GPT-2")
    assert facts["in training"].startswith("levanter.models.gpt2:Gpt2Config, ")
    assert facts["released"] == "gpt2, gpt2-large, gpt2-medium, gpt2-xl"
    # in the order of the sequence alone, unless plans choose how its attention is computed
    is_planned = build_model(read_config("gpt2", None), 1).is_attention_planned
    assert facts["sequence"].endswith(" in contiguous order") == (not is_planned)


def test_a_repository_of_the_hub():
    assert find_model("meta-llama/Meta-Llama-3-8B-Instruct") == NamedModel("llama", "llama-3-8b")


@pytest.mark.quick
def test_types_that_are_not_supported_and_text_models_of_others():
    values = facts_of("minimax")
    assert values["model"] is values["type"] is None
    assert values["refused"]["nearest"] == "mixtral" and "linear attention" in values["refused"]["differences"]
    done = run("models", "gemma3")
    assert "its text model alone is read, a gemma3_text" in done.stderr and "gemma-3-27b" in done.stdout


@pytest.mark.quick
def test_mistakes():
    fails(run("models", "lama-3-8b"), 2, "no model type; did you mean 'llama-3-8b'?")
    fails(run("models", "nothing-like-it"), 2, "no model type; `shardplan models` lists both")
    fails(run("models", "gpt2", "opt"), 2, "unrecognized arguments: opt")
