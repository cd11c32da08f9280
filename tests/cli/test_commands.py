"""The commands as a user runs them: their results, and data on stdout."""

import faulthandler
import json
import math
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, fails, run, start, transformers_losses
from evaluation_runs import EXTRACTION, PLANNING, arguments, summary
from processes import fork_python

import shardplan
from shardplan import evaluate
from shardplan.__main__ import COMMANDS
from shardplan.errors import ConfigError
from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES
from shardplan.plan.plan import Plan
from shardplan.runtime.processes.watch import frozen


@pytest.mark.parametrize(
    ("slice_name", "batch"),
    [
        ("cpu-5", 5),
        pytest.param("cpu-6", 6, marks=pytest.mark.whole),
        pytest.param("cpu-8", 4, marks=pytest.mark.whole),
        pytest.param("cpu-3", 2, marks=pytest.mark.whole),
    ],
)
def test_evaluation_equals_transformers(checkpoint, tmp_path, slice_name, batch):
    """Loss per document against float64 arithmetic on the logits of transformers."""
    settings = [f"--hardware.slice={slice_name}", f"--workload.batch={batch}", f"--json={tmp_path / 'plan.json'}"]
    done = start("eval", *arguments(checkpoint, tmp_path), *settings, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "loading" not in done.stderr and "evaluating" not in done.stderr
    results = summary(tmp_path)
    nats = transformers_losses(checkpoint)
    for row, expected in zip(results["texts"].values(), nats, strict=True):
        assert row["tokens"] == 63
        assert row["loss_per_token"] == pytest.approx(expected.mean(), abs=2e-6)
        assert row["perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    total = results["total"]
    assert total["loss_per_token"] == pytest.approx(nats.mean(), abs=2e-6)
    texts = [json.loads(line)["text"] for line in (checkpoint / "text.jsonl").read_text().splitlines()]
    # nothing predicts the first word of a text
    text_bytes = sum(len(text.partition(" ")[2]) for text in texts)
    assert total["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / text_bytes, rel=1e-6)
    assert {"shardplan", "jax", *LEVANTER_PACKAGES, "libtpu"} == results["versions"].keys()
    assert Plan.from_json(results["plan"]) == Plan.load(str(tmp_path / "plan.json"))
    assert "row 0" in done.stdout and "loss per token" in done.stdout and "PartitionSpec" in done.stdout


def test_evaluation_with_positions_sharded(checkpoint, tmp_path):
    """Attention gathers the keys of all positions."""
    pins = ["--pin", "position=model", "batch=data", "kv_head=", "heads=", "mlp=", "vocab="]
    done = run("eval", *arguments(checkpoint, tmp_path), "--mesh.model=4", *pins)
    assert done.returncode == 0, done.stderr
    results = summary(tmp_path)
    assert results["plan"]["attention"]["strategy"] == "all_gather"
    nats = transformers_losses(checkpoint)
    assert results["total"]["loss_per_token"] == pytest.approx(nats.mean(), abs=2e-6)


@pytest.mark.quick
def test_evaluation_in_a_program(checkpoint, tmp_path, raises_message):
    """`evaluate` takes the keys of the command, but for those that ask it to print or write something else."""
    settings = {
        "model": {"ref": str(checkpoint)},
        "data": {"path": str(checkpoint / "text.jsonl")},
        "workload": {"batch": 4, "position": 64, "param_dtype": "float32", "compute_dtype": "float32"},
        "output": str(tmp_path / "results"),
    }
    results = evaluate(**settings)
    assert results["total"]["loss_per_token"] == pytest.approx(transformers_losses(checkpoint).mean(), abs=2e-6)
    assert results["texts"] == summary(tmp_path)["texts"]
    with raises_message(ConfigError):
        evaluate(**settings, json="-")


def test_an_evaluation_in_a_program_checks_the_model_before_jax_starts(tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    settings = {"model": {"ref": "org/model", "config": "none.json"}, "data": {"path": str(tmp_path / "text.txt")}}
    code = f"""
import sys
from shardplan import evaluate
from shardplan.errors import ConfigError
try:
    evaluate(**{settings!r}, output="results")
except ConfigError as error:
    print(error, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "none.json" in done.stdout and done.stdout.endswith("False\n"), done.stdout


def test_an_evaluation_in_a_program_handles_no_signal(tmp_path, monkeypatch):
    """Signals, and whether it ends, are the program's."""
    import shardplan.eval.run

    (tmp_path / "text.txt").write_text("some text")
    recorded = []

    def record(*_):
        recorded.extend([faulthandler.unregister(signal.SIGUSR1), frozen._is_allowed])

    monkeypatch.setattr(shardplan.eval.run, "run_evaluation", record)
    evaluate(model={"ref": "org/model"}, data={"path": str(tmp_path / "text.txt")}, output=str(tmp_path / "results"))
    assert recorded == [False, False]


def test_several_batches_have_a_speed(checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), "--workload.position=8", "--tracker.kind=json")
    assert done.returncode == 0, done.stderr
    measured = summary(tmp_path)["run"]
    assert (measured["tokens"], measured["programs"]) == (126, 1) and measured["tokens_per_second"] > 0
    lines = [json.loads(line) for line in (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["hparams", *["log"] * measured["steps"], "finish"]
    assert lines[1]["metrics"].keys() == {"eval/progress", "eval/windows", "eval/waiting_seconds"}
    last = lines[-2]["metrics"]
    assert (last["eval/progress"], last["eval/windows"]) == (1.0, measured["windows"])
    assert last["eval/tokens_per_second"] == pytest.approx(measured["tokens_per_second"])
    step_seconds = summary(tmp_path)["plan"]["cost"]["step_seconds"]
    assert last["eval/speed_of_plan"] == pytest.approx(step_seconds / last["eval/step_seconds"])


def test_a_tracker_that_is_not_installed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    done = run("eval", *arguments(checkpoint, tmp_path), "--tracker.kind=tensorboard")
    message = "shardplan eval: tracker.kind tensorboard cannot be started: import of tensorboardX halted"
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
    assert "pip install tensorboardX" in done.stderr


def test_one_changed_import_in_a_levanter_script(checkpoint, tmp_path):
    """scripts/levanter_example.py prints the loss that the same script with Levanter's own converter prints."""
    script = (ROOT / "scripts" / "levanter_example.py").read_text()
    ours = "from shardplan import HFCheckpointConverter"
    theirs = "from levanter.compat.hf_checkpoints import HFCheckpointConverter"
    assert script.count(f"\n{ours}\n") == 1
    printed = []
    for name, text in (("ours.py", script), ("theirs.py", script.replace(f"\n{ours}\n", f"\n{theirs}\n"))):
        (tmp_path / name).write_text(text)
        argv = (
            tmp_path / name, "--config_path", ROOT / "scripts" / "levanter_example.yaml", "--hf_checkpoint", checkpoint,
            "--text", checkpoint / "text.jsonl", "--trainer.per_device_eval_parallelism", "1",
        )  # fmt: skip
        process = fork_python(argv, tmp_path, JAX_NUM_CPU_DEVICES="8", PYTHONPATH=str(ROOT))
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        printed.append([line for line in output.splitlines() if line.startswith("loss per token")])
    assert printed[0] == printed[1] and len(printed[0]) == 1


def test_a_dry_run_says_how_long_the_texts_take(checkpoint, tmp_path):
    """Each of two texts has 64 tokens; without the tokenizer their characters count."""
    every = (f"--data.path={checkpoint / 'text.jsonl'}", *EXTRACTION, "--dry_run", "--workload.batch=8")
    done = run("eval", f"--model.ref={checkpoint}", *every)
    assert done.returncode == 0 and "windows/s" in done.stdout
    assert "texts            26 windows in 26 sequences: 4 steps, " in done.stdout, done.stdout
    done = run("eval", f"--model.config={checkpoint / 'config.json'}", *every)
    assert "about" in done.stdout and "the tokenizer is not at hand: 4 characters count as a token" in done.stdout
    done = run("eval", f"--model.ref={checkpoint}", *PLANNING, "--dry_run", "--data.path=nowhere.txt")
    assert done.returncode == 0 and "no duration of the texts: data.path nowhere.txt does not exist" in done.stderr


@pytest.mark.quick
def test_positions_by_default_are_those_of_the_model(checkpoint, tmp_path):
    """A stride is checked against the windows that there are, not those of the default."""
    settings = [each for each in arguments(checkpoint, tmp_path) if "position" not in each]
    done = run("eval", *settings, "--dry_run", "--json=-")
    assert done.returncode == 0 and json.loads(done.stdout)["workload"]["position"] == 256, done.stderr
    fails(run("eval", *settings, "--task.stride=300"), 2, "task.stride is 300, and windows have 256 tokens")


def test_results_in_an_object_store(checkpoint, tmp_path, store):
    """They are written, merged, drawn and found again there; what two runs say is compared there."""
    client, _, _ = store
    settings = [argument for argument in arguments(checkpoint, tmp_path) if "output" not in argument]
    settings += [*EXTRACTION, "--workload.batch=8", "--task.shard=8", "--workload.position=16"]
    done = run("eval", *settings, "--output=s3://models/run")
    assert done.returncode == 0, done.stderr
    names = [entry["Key"] for entry in client.list_objects_v2(Bucket="models")["Contents"]]
    assert {"run/run.json", "run/windows.parquet", "run/summary.json", "run/index.html"} < {*names}
    assert sum(name.startswith("run/parts/") for name in names) >= 4
    client.delete_object(Bucket="models", Key=next(name for name in names if name.startswith("run/parts/")))
    done = run("eval", *settings, "--output=s3://models/run")
    assert done.returncode == 0 and "1 program compiled" in done.stdout, done.stderr
    done = run("eval", *settings, "--output=s3://models/run")
    assert done.returncode == 0 and "all windows have results already" in done.stderr
    table = pq.read_table(pa.BufferReader(client.get_object(Bucket="models", Key="run/windows.parquet")["Body"].read()))
    assert table["window"].to_pylist() == [*range(26)]
    done = run("eval", *settings, "--output=s3://models/run", "--task.stride=5")
    assert done.returncode == 2 and "holds the results of another run" in done.stderr


def test_a_precision_study(checkpoint, tmp_path):
    """Every third window of a text is scored in both types."""
    settings = [argument for argument in arguments(checkpoint, tmp_path) if "workload" not in argument]
    done = run("eval", *settings, *EXTRACTION, "--precision_study=10", "--workload.batch=8")
    assert done.returncode == 0, done.stderr
    study = json.loads((tmp_path / "results" / "precision.json").read_text())
    assert study["windows"] == 9 and 0 < study["token"]["q50"] < 0.1
    assert "log p_z of a window" in done.stdout and "greedy" in done.stdout
    done = run("eval", *settings, "--precision_study=10")
    fails(done, 2, "precision_study compares windows of extraction; set task.kind to that")
    done = run("eval", *settings, *EXTRACTION, "--precision_study=10", "--json=-")
    fails(done, 2, "precision_study has two plans; leave json out: each summary.json has its own")


def test_dry_run_of_405b(tmp_path):
    done = run("eval", "--config", "configs/405b.yaml", "--dry_run", "--json", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    assert "128 devices of v4-256" in done.stdout and "fits v4-256" in done.stdout and "trainer:" in done.stdout
    assert "of which the search took" in done.stderr
    plan = Plan.load(str(tmp_path / "plan.json"))
    assert plan.hardware.devices == 128


@pytest.mark.parametrize("name", ["8b", "70b", "mixtral-8x7b"])
def test_other_configs_plan_to_stdout(name):
    done = run("plan", "--config", f"configs/{name}.yaml", "--json", "-")
    assert done.returncode == 0, done.stderr
    plan = Plan.from_json(json.loads(done.stdout))
    assert math.prod(plan.mesh.values()) == plan.hardware.devices


def test_console_script():
    done = subprocess.run([sys.executable, "-m", "shardplan", "pln"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "shardplan: unknown command 'pln'; did you mean 'plan'?\n"
    done = subprocess.run([sys.executable, "-m", "shardplan", "--help"], capture_output=True, text=True)
    shown = {line[2:20].strip() for line in done.stdout.splitlines() if line.startswith("  ") and line[20:].strip()}
    assert done.returncode == 0 and COMMANDS.keys() <= shown
    words = " ".join(done.stdout.split())
    assert "the same command resumes it. launch Print" in words  # the first paragraph of a docstring only
    done = run("plan", "dif", "a.json", "b.json")
    fails(done, 2, "shardplan plan: unknown command 'dif'; did you mean 'diff'?")
    fails(run("plan", "x.yaml"), 2, "unexpected argument 'x.yaml'")
    done = subprocess.run([sys.executable, "-m", "shardplan", "plan", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--workload.batch" in done.stdout
    for argv in (["shardplan", "--version"], ["shardplan", "plan", "--version"], ["shardplan.eval", "--version"]):
        done = subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"shardplan {shardplan.__version__}\n")


def test_batch_that_no_mesh_axis_divides(checkpoint):
    """It stays replicated, and the plan says so."""
    done = run("plan", f"--model.ref={checkpoint}", *PLANNING, "--workload.batch=3", "--mesh.data=8")
    assert done.returncode == 0, done.stderr
    assert "excluded: batch (3), " in done.stdout and "not divisible by data = 8" in done.stdout


def test_results_that_are_there_are_not_computed_again(checkpoint, tmp_path, caplog):
    """The text has two windows, of which a line speaks; a second run with the folder loads nothing."""
    done = run("eval", *arguments(checkpoint, tmp_path), "--workload.batch=16")
    assert done.returncode == 0, done.stderr
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "shardplan.eval.run"]
    expected = "the texts fill 2 of 16 rows of 64 tokens of a batch: the others are padding; workload.batch "
    assert warning.startswith(expected) and warning.endswith(" is enough")
    assert 2 <= int(warning.removeprefix(expected).split()[0]) < 16
    first = summary(tmp_path)
    done = run("eval", *arguments(checkpoint, tmp_path), "--workload.batch=16")
    assert done.returncode == 0 and "all windows have results already: nothing is loaded" in done.stderr
    assert summary(tmp_path) == first
    done = run("eval", *arguments(checkpoint, tmp_path), "--task.stride=9")
    message = "holds the results of another run: its task.stride is 63, this run's is 9; name another folder"
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
    done = run("eval", *arguments(checkpoint, tmp_path), "--task.stride=64")
    fails(done, 2, "task.stride is 64, and windows have 64 tokens (workload.position); it must be at most 63")
