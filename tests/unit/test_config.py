"""Files, overrides, merging, and one clear line for everything that is wrong."""

import pytest

from shardplan import config
from shardplan.errors import ConfigError


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"], ["--config_path", "{}"], ["--config_path={}"]])
def test_config_flag_forms(tmp_path, form):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\nworkload: {batch: 3}\n")
    assert config.load([part.format(path) for part in form], "test").workload.batch == 3


def test_files_merge_deeply_and_overrides_win(tmp_path):
    a = write(tmp_path, "a.yaml", "model: {ref: x}\nworkload: {batch: 3, position: 64}\n")
    b = write(tmp_path, "b.yaml", "workload: {batch: 5}\n")
    loaded = config.load(["--config", a, "--config", b, "--mesh.model", "16", "--dry_run"], "test")
    assert (loaded.workload.batch, loaded.workload.position) == (5, 64)
    assert (loaded.mesh.model, loaded.mesh.data, loaded.dry_run) == (16, None, True)


def test_text_on_the_command_line_stays_text():
    loaded = config.load(["--model.ref", "007", "--output=[1", "--model.config", "true"], "test")
    assert (loaded.model.ref, loaded.output, loaded.model.config) == ("007", "[1", "true")
    assert config.load(["--model.ref=x", "--data.path=null"], "test").data.path is None


def test_hyphens_and_a_model_by_its_file():
    loaded = config.load(["--model", "configs/models/llama-3.1-8b.json", "--dry-run", "--what-if"], "test")
    assert loaded.model.config == "configs/models/llama-3.1-8b.json" and loaded.dry_run and loaded.what_if
    assert config.load(["--model=org/model"], "test").model.ref == "org/model"


def test_what_was_set_is_known():
    loaded = config.load(["--model", "org/model", "--workload.batch", "8"], "test")
    assert loaded.given == {"model.ref", "workload.batch"}
    assert loaded == config.load(["--model.ref", "org/model"], "test")  # 8 is the default


def test_dash_is_a_value():
    assert config.load(["--model.ref", "x", "--json", "-"], "test").json == "-"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workload.batchsize", "3"],
         "command line: unknown key 'workload.batchsize'; did you mean 'workload.batch'?"),
        (["--batch", "3"], "command line: unknown key 'batch'; did you mean 'workload.batch'?"),
        (["--model.ref", "x", "--workload.batch", "3x"], "command line: workload.batch is '3x'; it must be an integer"),
        (["--model.ref", "x", "--workload.batch", "0"], "workload.batch is 0; it must be at least 1"),
        (["--model.ref", "x", "--workload.position", "1"], "workload.position is 1; it must be at least 2"),
        (["--model.ref", "x", "--workload.param_dtype", "bf16"],
         "workload.param_dtype is 'bf16'; did you mean 'bfloat16'?"),
        (["--model.ref", "x", "--workload", "3"], "command line: workload is a section, not a value; set a key in it"),
        (["--model.ref", "x", "--workload.kind", "train", "--workload.batch", "12", "--workload.microbatches", "5"],
         "workload.microbatches 5 does not divide workload.batch 12; use 4"),
        (["--model.ref", "x", "--workload.microbatches", "2"],
         "workload.microbatches is 2: only training has them; set workload.kind to train"),
        (["--workload.batch", "3"],
         "no model: set model.ref to a Hugging Face folder, or model.config to a config.json"),
        (["--model.ref", "x", "--workload.batch", "null"],
         "command line: workload.batch is None; it must be an integer"),
        (["--model.ref", "x", "--workload.batch", "["], "command line: workload.batch is '['; it must be an integer"),
        (["--model.ref", "x", "--json"], "command line: json is True; it must be text or null"),
        (["--model.ref", "x", "--dry_run", "3"], "command line: dry_run is 3; it must be true or false"),
        (["--workload.batch=8", "--workload.batch.x=3"],
         "command line: unknown key 'workload.batch.x'; did you mean 'workload.batch'?"),
        (["eval"], "unexpected argument 'eval'; options look like --workload.batch 16"),
        (["--config"], "--config needs the path of a YAML file"),
    ],
)  # fmt: skip
def test_bad_arguments(argv, message):
    with pytest.raises(ConfigError) as error:
        config.load(argv, "test")
    assert str(error.value) == message


def test_unknown_key_names_its_file(tmp_path):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\nmesh: {modle: 3}\n")
    with pytest.raises(ConfigError) as error:
        config.load(["--config", path], "test")
    assert str(error.value) == f"{path}: unknown key 'mesh.modle'; did you mean 'mesh.model'?"


def test_unusable_files(tmp_path):
    for text, message in (
        ("a: [", "is not YAML"),
        ("model: {ref: 007}", "model.ref is 7; it must be text"),
        ("model: {ref: x}\noutput: null", "output is None; it must be text"),
        ("- 1\n", "holds list, not a mapping of keys"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.load(["--config", write(tmp_path, "b.yaml", text)], "test")
    write(tmp_path, "tiny.yaml", "")
    with pytest.raises(ConfigError, match=r"tini.yaml does not exist; did you mean '.*tiny.yaml'\?"):
        config.load(["--config", str(tmp_path / "tini.yaml")], "test")


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as ended:
        config.load(["--help"], "prog")
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--workload.position" in text and "Tokens per sequence." in text and "--config FILE" in text


def test_shipped_configs_are_valid():
    from pathlib import Path

    files = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert len(files) >= 5
    for path in files:
        config.load(["--config", str(path)], "test")
