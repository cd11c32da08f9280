"""Bad input to the commands: an exit code and one clear line, with what to do."""

import json
import shutil
import subprocess

import pytest
from conftest import fails, run, start, word_tokenizer
from evaluation_runs import PLANNING, arguments
from processes import fork_python


@pytest.mark.quick
def test_a_model_that_is_not_supported_is_refused_first(checkpoint, tmp_path):
    """By every command, before anything is planned or read, and never with advice to take it for another."""
    folder = tmp_path / "moe"
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_next", "num_experts": 128}))
    (folder / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "levanter.yaml").write_text("trainer: {mesh: {axes: {model: 2}}}")
    text = f"--data.path={checkpoint / 'text.jsonl'}"
    commands = (
        ("plan",), ("plan", f"--lint={tmp_path / 'levanter.yaml'}"), ("verify", "--hardware.slice=v5e-8"),
        ("eval", text), ("checkpoint", "--schedule"), ("checkpoint", "convert", f"--to={tmp_path / 'copy'}"),
    )  # fmt: skip
    for command, *flags in commands:
        done = run(command, *flags, f"--model.ref={folder}")
        fails(done, 2, "model_type 'qwen3_next' is not supported; nearest is 'qwen3', which is another model: ")
        assert "num_experts 128" in done.stderr and "did you mean" not in done.stderr


def test_keys_of_another_command():
    fails(run("plan", "--config=configs/8b.yaml", "--against=x"), 2, "against is a key of verify, not of plan")
    fails(run("plan", "--config=configs/8b.yaml", "--schedule"), 2, "schedule is a key of checkpoint, not of plan")


def test_unknown_key(checkpoint, tmp_path):
    done = start("eval", *arguments(checkpoint, tmp_path), "--workload.bacth=4")
    fails(done, 2, "unknown key 'workload.bacth'; did you mean 'workload.batch'?")


def test_missing_folder(checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), f"--model.ref={checkpoint.parent / 'lama'}")
    fails(done, 2, f"lama does not exist; did you mean '{checkpoint}'?")


def test_missing_shard(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model-00002-of-00003.safetensors").unlink()
    done = run("eval", *arguments(broken, tmp_path))
    assert done.returncode == 4
    assert "1 of 3 shards missing: model-00002-of-00003.safetensors; download it again" in done.stderr
    assert "Traceback" not in done.stderr


def test_truncated_shard(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    shard = broken / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = run("eval", *arguments(broken, tmp_path))
    assert done.returncode == 4 and "lies outside the file; it is truncated" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_model_than_its_config(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "intermediate_size": 64}))
    done = run("eval", *arguments(broken, tmp_path))
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "does not match the model of its config.json: 18 tensors missing (model.layers.2." in done.stderr
    shapes = "model.layers.0.mlp.down_proj.weight has (96, 128), the model (96, 64)"
    assert f"6 tensors with a different shape ({shapes}" in done.stderr


def test_unsupported_model_type(checkpoint, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "lama"}))
    done = run("eval", *arguments(checkpoint, tmp_path), f"--model.config={config}")
    fails(done, 2, "model_type 'lama' is not supported; did you mean 'llama'? (supported: apertus, cohere, ")


def test_more_devices_than_exist(checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), "--mesh.model=16")
    fails(done, 2, "mesh.model 16 does not divide the 8 devices of cpu-8")
    process = fork_python(["-m", "shardplan.eval", *arguments(checkpoint, tmp_path), "--hardware.slice=v4-256"])
    done = subprocess.CompletedProcess(process.args, process.wait(), process.stdout.read(), process.stderr.read())
    fails(done, 2, "hardware.slice v4-256 has 128 devices, JAX sees 1 (cpu); run on that slice, plan with --dry_run")


def test_unwritable_targets(checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), f"--json={tmp_path}")
    fails(done, 2, f"json '{tmp_path}' cannot be written: Is a directory")
    done = run("eval", *arguments(checkpoint, tmp_path), "--output=/dev/full")
    message = "/dev/full cannot be written to: /dev/full is a file, not a folder"
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
    done = run("eval", *arguments(checkpoint, tmp_path), "--output=x.json")
    fails(done, 2, "output is 'x.json'; it must be a folder, such as results/eval: its summary.json has the results")
    done = run("plan", f"--model.ref={checkpoint}", *PLANNING, "--json=/dev/full")
    assert done.returncode == 2 and "cpu-8" in done.stdout
    assert "json '/dev/full' cannot be written: No space left on device" in done.stderr.splitlines()[-1]


def test_data_of_an_unknown_kind(checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), f"--data.path={checkpoint / 'config.json'}")
    fails(done, 2, f"data.path {checkpoint / 'config.json'} ends in none of .txt, .jsonl")


@pytest.mark.quick
def test_tokenizer_of_another_model(checkpoint, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(checkpoint, folder)
    word_tokenizer(200).save(str(folder / "tokenizer.json"))
    done = run("eval", *arguments(folder, tmp_path))
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "but config.json and the embedding of the weights have 256 tokens; use the tokenizer of this" in done.stderr


def test_vocab_size_of_another_model(checkpoint, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    done = run("eval", *arguments(folder, tmp_path))
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert (
        "and the embedding of the weights has 256 rows, but config.json has vocab_size 40; set vocab_size to 256"
        in done.stderr
    )


def test_evaluation_needs_a_ref(golden, checkpoint, tmp_path):
    settings = ["--model.ref=", f"--model.config={golden / 'llama' / 'config.json'}"]
    done = run("eval", *arguments(checkpoint, tmp_path), *settings)
    fails(done, 2, "model.ref is not set; an evaluation needs the weights of a checkpoint, or use --dry_run")


def test_nothing_fits():
    done = run("plan", "--config", "configs/405b.yaml", "--hardware.slice=v4-16")
    fails(done, 3, "no plan fits v4-16: the nearest miss, mesh replica ")
    assert "GiB are missing; use a larger hardware.slice, " in done.stderr


def test_no_data(checkpoint):
    done = run("eval", f"--model.ref={checkpoint}")
    fails(done, 2, "data.path is not set; name a file or folder of texts to evaluate, or use --dry_run")


def test_no_tokenizer(golden, checkpoint, tmp_path):
    done = run("eval", *arguments(checkpoint, tmp_path), f"--model.ref={golden / 'llama'}")
    assert done.returncode == 4
    assert "has no tokenizer.json; save a fast tokenizer there with transformers" in done.stderr
