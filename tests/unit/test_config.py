"""Configurations: files, arguments, merging, and one clear line for everything that is wrong."""

from operator import attrgetter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.config import PlanConfig, load_config, parse_config
from shardplan.config.command_flags import (
    COMMANDS,
    CheckpointCommand,
    ConvertCommand,
    EvalCommand,
    LaunchCommand,
    PlanCommand,
    VerifyCommand,
)
from shardplan.config.keys import keys_of
from shardplan.config.reading.yaml_file import read_yaml
from shardplan.config.sections import EvaluationKind, ModelConfig
from shardplan.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"], ["--config_path", "{}"], ["--config_path={}"]])
def test_config_flag_forms(tmp_path, form):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\nworkload: {batch: 3}\n")
    assert parse_config([part.format(path) for part in form]).workload.batch == 3


def test_files_merge_deeply_and_overrides_win(tmp_path):
    a = write(tmp_path, "a.yaml", "model: {ref: x}\nworkload: {batch: 3, position: 64}\n")
    b = write(tmp_path, "b.yaml", "workload: {batch: 5}\n")
    loaded = parse_config(["--config", a, "--config", b, "--mesh.model", "16", "--dry_run"], EvalCommand)
    assert (loaded.workload.batch, loaded.workload.position) == (5, 64)
    assert (loaded.mesh.model, loaded.mesh.data, loaded.dry_run) == (16, None, True)


def test_text_on_the_command_line_stays_text():
    loaded = parse_config(["--model.ref", "007", "--output=[1", "--model.config", "true"], EvalCommand)
    assert (loaded.model.ref, loaded.output, loaded.model.config) == ("007", "[1", "true")
    assert parse_config(["--model.ref=x", "--data.path=null"], EvalCommand).data.path is None


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("llama-3.1-8b", "config"), ("a/config.json", "config"), ("org/model", "ref"), ("gs://bucket/model", "ref"),
        ("tests", "ref"),
    ],
)  # fmt: skip
def test_hyphens_and_a_model_by_its_file(model, key):
    loaded = parse_config(["--model", model, "--what-if"], PlanCommand)
    assert getattr(loaded.model, key) == model and loaded.what_if


def test_what_was_set_is_known():
    loaded = parse_config(["--model", "org/model", "--workload.batch", "8"])
    assert loaded.given == {"model.ref", "workload.batch"}
    assert loaded == parse_config(["--model.ref", "org/model"])  # 8 is the default


def test_dash_is_a_value():
    assert parse_config(["--model.ref", "x", "--json", "-"], PlanCommand).json == "-"


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
         "no model: name one with --model, or set model.ref to a Hugging Face folder, or model.config to a "
         "config.json"),
        (["--model.ref", "x", "--workload.batch", "null"],
         "command line: workload.batch is None; it must be an integer"),
        (["--model.ref", "x", "--workload.batch", "["], "command line: workload.batch is '['; it must be an integer"),
        (["--model.ref", "x", "--json"], "command line: --json: expected one argument"),
        (["--model.ref", "x", "--what_if", "3"], "command line: what_if is 3; it must be true or false"),
        (["--model.ref", "x", "--dry_run"],
         "command line: dry_run is a key of eval, train, launch, launch train, checkpoint convert, not of plan; leave "
         "it out"),
        (["--model.ref", "x", "--pin"], "command line: --pin: expected at least one argument"),
        (["--model.ref", "x", "--workload.batch", str(2**31)],
         "workload.batch is 2147483648; it must be at most 2147483647"),
        (["--model.ref", "x", "--workload.gradient_checkpointing", "false"],
         "workload.gradient_checkpointing is 'false'; did you mean 'save_all'?"),
        (["--model.ref", "x", "--lint", ""],
         "command line: lint is ''; it must not be empty; leave it out, or write null"),
        (["--slice", "v5e-8"], "command line: unknown key 'slice'; did you mean 'hardware.slice'?"),
        (["--modle", "x"], "command line: unknown key 'modle'; did you mean 'model'?"),
        (["--workload.batch=8", "--workload.batch.x=3"],
         "command line: unknown key 'workload.batch.x'; did you mean 'workload.batch'?"),
        (["--workload.seq_len", "8"],
         "command line: unknown key 'workload.seq_len'; did you mean 'workload.position'?"),
        (["--max-seq-length", "8"],
         "command line: unknown key 'max_seq_length'; did you mean 'workload.position'?"),
        (["--batch_size", "8"], "command line: unknown key 'batch_size'; did you mean 'workload.batch'?"),
        (["--trainer.train_batch_size", "8"],
         "command line: unknown key 'trainer.train_batch_size'; did you mean 'workload.batch'?"),
        (["--mesh.tensor", "8"], "command line: unknown key 'mesh.tensor'; did you mean 'mesh.model'?"),
        (["--mesh.fsdp", "8"], "command line: unknown key 'mesh.fsdp'; did you mean 'mesh.data'?"),
        (["--launcher", "slurm"], "command line: unknown key 'launcher'; did you mean 'to', a key of launch?"),
        (["--Workload.Batch", "8"], "command line: unknown key 'Workload.Batch'; did you mean 'workload.batch'?"),
        (["--quantization", "int8"], "command line: unknown key 'quantization'; `--help` lists the keys"),
        (["--mesh.pipeline", "2"],
         "command line: unknown key 'mesh.pipeline'; valid: mesh.data, mesh.model, mesh.replica"),
        (["--model.ref", "x", "--workload.param_dtype", "float64"],
         "workload.param_dtype is 'float64'; valid: bfloat16, float16, float32"),
        (["--model.ref", "x", "--workload.param_dtype", "int8"],
         "workload.param_dtype is 'int8'; valid: bfloat16, float16, float32"),
        (["--model.ref", "x", "--workload.param_dtype", "BFLOAT16"],
         "workload.param_dtype is 'BFLOAT16'; did you mean 'bfloat16'?"),
        (["--model.ref", "x", "--workload.compute_dtype", "fp16"],
         "workload.compute_dtype is 'fp16'; did you mean 'float16'?"),
        (["--model.ref", "x", "--workload.kind", "training"], "workload.kind is 'training'; did you mean 'train'?"),
        (["--model.ref", "x", "--workload.kind", "decode"],
         "workload.kind is 'decode'; valid: eval, prefill, score, train"),
        (["--model.ref", "${NO_SUCH_VARIABLE}/model"],
         "command line: model.ref is '${NO_SUCH_VARIABLE}/model'; variables such as ${NO_SUCH_VARIABLE} are not "
         "expanded: NO_SUCH_VARIABLE is not set; write the path itself"),
        (["--model.ref", "x", "--json", "$NO_SUCH_VARIABLE/plan.json"],
         "command line: json is '$NO_SUCH_VARIABLE/plan.json'; variables such as $NO_SUCH_VARIABLE are not expanded: "
         "NO_SUCH_VARIABLE is not set; write the path itself"),
        (["eval"], "unexpected argument 'eval'; options look like --workload.batch 16"),
        (["--config"], "command line: --config/--config_path: expected one argument"),
    ],
)  # fmt: skip
def test_bad_arguments(argv, message):
    with pytest.raises(ConfigError) as error:
        parse_config(argv, PlanCommand)
    assert str(error.value) == message


def test_variables_that_are_set(tmp_path, monkeypatch):
    """Dollar signs within names, and shell commands, are read as they are."""
    monkeypatch.setenv("BUCKET", "my-bucket")
    path = write(tmp_path, "a.yaml", "model: {ref: 'gs://${BUCKET}/model'}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}: model.ref is 'gs://${{BUCKET}}/model'; variables such as ${{BUCKET}} are not expanded: write the "
        "value of BUCKET"
    )
    (tmp_path / "$BUCKET").mkdir()
    for name in ("a$b", f"{tmp_path}/$BUCKET"):
        assert load_config(model={"ref": name}).model.ref == name
    launched = parse_config(["--model.ref", "x", "--to", "slurm", "--launch.setup", "cd $HOME"], LaunchCommand)
    assert launched.launch.setup == "cd $HOME"


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"workload": {"batch": np.int64(4)}}, "workload.batch", 4),
        ({"workload": {"batch": np.array(4)}}, "workload.batch", 4),
        ({"mesh": {"model": np.uint8(2)}}, "mesh.model", 2),
        ({"workload": {"param_dtype": np.float16}}, "workload.param_dtype", "float16"),
        ({"workload": {"param_dtype": np.dtype("float32")}}, "workload.param_dtype", "float32"),
        ({"workload": {"param_dtype": jnp.bfloat16}}, "workload.param_dtype", "bfloat16"),
        ({"workload": {"compute_dtype": jnp.dtype("bfloat16")}}, "workload.compute_dtype", "bfloat16"),
        ({"pin": "mlp=model"}, "pin", ("mlp=model",)),
        ({"forbid": {"vocab"}}, "forbid", ("vocab",)),
        ({"plan": Path("a/plan.json")}, "plan", "a/plan.json"),
    ],
    ids=str,
)
def test_values_of_python(sections, key, value):
    loaded = attrgetter(key)(load_config(model={"ref": "x"}, **sections))
    assert loaded == value and type(loaded) is type(value)


def test_a_member_of_another_enum(raises_message):
    with raises_message(ConfigError):
        load_config(model={"ref": "x"}, workload={"kind": EvaluationKind.LOSS})


def test_one_text_for_a_list_in_a_file(tmp_path):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\npin: mlp=model\n")
    assert load_config(path).pin == ("mlp=model",)


def test_files_that_are_missing(tmp_path):
    """Without a similar file there is no hint; a link names what it points to."""
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "gone.yaml")
    for path, message in (
        (tmp_path / "other.yaml", "does not exist"),
        (link, f"is a link to {tmp_path}/gone.yaml, which does not exist"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(str(path))
        assert str(error.value) == f"config file {path} {message}"


def test_a_configuration_of_levanter(tmp_path):
    path = write(tmp_path, "a.yaml", "data: {tokenizer: x}\ntrainer: {train_batch_size: 8}\n")
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", path])
    assert str(error.value) == (
        f"config file {path} is one of Levanter: it has a section trainer; check it with `plan --lint {path}`"
    )


def test_unknown_key_names_its_file(tmp_path):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\nmesh: {modle: 3}\n")
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", path])
    assert str(error.value) == f"{path}: unknown key 'mesh.modle'; did you mean 'mesh.model'?"


def test_unusable_files(tmp_path, raises_message):
    for text, message in (
        ("a: [", "is not YAML"),
        ("model: {ref: 007}", "model.ref is 7; it must be text"),
        ("model: {ref: x}\noutput: null", "output is None; it must be text"),
        ("- 1\n", "contains a list, not keys with values"),
        ("", "contains nothing, not keys with values"),
        ("model: &a {ref: *a}", "a section contains itself, through an alias"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(["--config", write(tmp_path, "b.yaml", text)])
    write(tmp_path, "tiny.yaml", "")
    with raises_message(ConfigError):
        parse_config(["--config", str(tmp_path / "tini.yaml")])


def test_values_as_they_are_meant(tmp_path, monkeypatch, raises_message):
    """A section without keys, a home folder that no shell replaces, and a number that YAML 1.1 takes for text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "a.yaml", "model: {ref: ~/model}\nworkload:\nload: {gib: 1e1}\njson: ~/plan.json\n")
    loaded = parse_config(["--config", "~/a.yaml", "--model.config", "~/config.json"], CheckpointCommand)
    assert loaded.model == ModelConfig(f"{tmp_path}/model", f"{tmp_path}/config.json")
    assert loaded.load.gib == 10.0 and loaded.json == f"{tmp_path}/plan.json"
    assert parse_config(["--model.ref=x", "--load.gib", "5e-1"], CheckpointCommand).load.gib == 0.5
    with raises_message(ConfigError):
        parse_config(["--model.ref=x", "--load.gib", ".inf"], CheckpointCommand)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {ref: x}\nworkload:\n  batch: 3\n  batch: 4\n", "key 'batch' is in line 3 and again in line 4"),
        ("model: {ref: x}\nmesh: {model: 2}\nmodel: {ref: y}\n", "key 'model' is in line 1 and again in line 3"),
        ('model: {ref: x, "ref": y}\n', "key 'ref' is in line 1 and again in line 1"),
    ],
)
def test_a_key_twice(tmp_path, text, message):
    """YAML itself would silently keep the last."""
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError) as error:
        parse_config(["--config", path])
    assert str(error.value) == f"config file {path}: {message}; remove one of the two"


def test_merged_keys_may_be_overridden(tmp_path):
    """`<<` brings in keys that a mapping has itself, also of an anchor that is deeper in the file than its use."""
    text = "model: {ref: x}\nmesh: &deep {<<: &base {model: 1, data: 2}, model: 4}\nworkload: {batch: 5}\n"
    loaded = parse_config(["--config", write(tmp_path, "a.yaml", text)])
    assert (loaded.mesh.model, loaded.mesh.data) == (4, 2)
    nested = write(tmp_path, "b.yaml", "a: {b: &deep {<<: {x: 1}, x: 2}}\nc: {<<: *deep, x: 3}\n")
    assert read_yaml(nested) == {"a": {"b": {"x": 2}}, "c": {"x": 3}}


def test_files_are_shared_between_commands(tmp_path, raises_message):
    """A file may hold keys of other commands: their types are checked, and they are left out."""
    path = write(tmp_path, "a.yaml", "model: {ref: x}\noutput: results.json\nto: copy\nagainst: [plan.json]\n")
    read = ["--config", path]
    assert parse_config(read, EvalCommand).output == "results.json"
    assert parse_config(read, ConvertCommand).to == "copy"
    assert parse_config(read, VerifyCommand).against == ("plan.json",)
    assert parse_config(read).given == {"model.ref"}
    with raises_message(ConfigError):
        parse_config(["--config", write(tmp_path, "c.yaml", "model: {ref: x}\noutput: null")], ConvertCommand)


def test_keys_of_other_commands_are_refused_among_arguments():
    for name, cls in COMMANDS.items():
        own = keys_of(cls)
        for key in {key for other in COMMANDS.values() for key in keys_of(other)} - own.keys():
            with pytest.raises(ConfigError) as error:
                parse_config(["--model.ref=x", f"--{key}=1"], cls)
            owners = [other for other in COMMANDS if key in keys_of(COMMANDS[other])]
            expected = f"command line: {key} is a key of {', '.join(owners)}, not of {name}; leave it out"
            assert str(error.value) == expected


def test_from_python(tmp_path, raises_message):
    path = write(tmp_path, "a.yaml", "model: {ref: x}\nworkload: {batch: 3}\noutput: results.json\n")
    loaded = load_config(path, workload={"position": 64}, pin=["mlp=model"])
    assert isinstance(loaded, PlanConfig) and (loaded.workload.batch, loaded.workload.position) == (3, 64)
    assert loaded.pin == ("mlp=model",)
    with raises_message(ConfigError):
        load_config(path, workload={"bach": 4})


@pytest.mark.parametrize(("name", "cls"), COMMANDS.items())
def test_help_lists_the_keys_of_the_command(capsys, name, cls):
    with pytest.raises(SystemExit) as ended:
        parse_config(["--help"], cls)
    text = capsys.readouterr().out
    assert ended.value.code == 0
    flags = {line.split()[0].rstrip(",") for line in text.splitlines() if line.lstrip().startswith("--")}
    assert f"usage: shardplan {name} [--config FILE]" in text and "Tokens per sequence; auto for" in text
    assert flags == {f"--{key}" for key in keys_of(cls)} | {"--config", "--model", "--quiet", "--verbose"}
    limit = 140 if cls is LaunchCommand else 120  # that of launch lists the keys of eval, too
    assert len(text.splitlines()) <= limit, "help takes more than three screens"


def test_what_processes_must_have_alike():
    """What decides which programs run, what is waited for, and when a run ends; not paths, which differ by host."""
    config = parse_config(["--model.ref", "a", "--data.path", "b", "--output", "c"], EvalCommand)
    sections = {name.partition(".")[0] for name in config.facts}
    assert {"mesh", "task", "tracker", "gate", "deadline", "verify", "precision_study"} <= sections
    assert not sections & {"model", "data", "output", "plan", "profile"}


def test_shipped_configs_are_valid():
    files = sorted(CONFIGS.glob("*.yaml"))
    assert len(files) >= 5
    for path in files:
        for cls in COMMANDS.values():
            parse_config(["--config", str(path)], cls)


@pytest.mark.parametrize(
    ("model", "key"), [("llama-3.1-8b", "config"), ("my/config.json", "config"), ("org/model@v1", "ref")]
)
def test_a_model_by_its_name_alone(tmp_path, model, key):
    """In files and in Python `model: x` means what `--model x` does."""
    path = write(tmp_path, "a.yaml", f"model: {model}\nworkload: {{batch: 3}}\n")
    for loaded in (
        load_config(path),
        load_config(model=model, workload={"batch": 3}),
        parse_config(["--config", path]),
    ):
        assert getattr(loaded.model, key) == model and loaded.workload.batch == 3
        assert f"model.{key}" in loaded.given


def test_a_list_of_models_is_refused(tmp_path, raises_message):
    with raises_message(ConfigError):
        load_config(write(tmp_path, "a.yaml", "model: [llama-3.1-8b]"))
