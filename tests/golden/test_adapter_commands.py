"""Commands with an adapter: converting, the schedule of reads, checksums, and the results of an evaluation."""

import itertools
import json
import shutil

import jax
import numpy as np
import pytest
from adapted_llama import BASE, GOLDEN, QV, STORED
from coded_checkpoints import write_stored
from conftest import run
from lora_adapters import PREFIX, matrices, merge, read_folder, write_adapter
from safetensors.numpy import save_file

from shardplan.checkpoint.load import stream_checkpoint
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_adapter, open_folder


@pytest.mark.quick
def test_checksums_include_the_files_of_an_adapter(capsys):
    opened = open_folder(str(GOLDEN))
    template = build_model(read_config(None, opened), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    stream_checkpoint(template, opened, mesh, None, None, checksum=True, adapter=open_adapter(str(GOLDEN / "adapter")))
    assert "their store has none for 2 of 2 files" in capsys.readouterr().err


def test_converted_with_an_adapter(tmp_path):
    """The written checkpoint is the merged one; a Plan names the adapter, and who reads the Plan applies it."""
    settings = [
        "--hardware.slice=cpu-8",
        "--workload.param_dtype=float32",
        "--workload.batch=8",
        "--workload.position=8",
    ]
    own = [f"--model={GOLDEN}", f"--model.adapter={GOLDEN / 'adapter'}", *settings]
    done = run("plan", *own, f"--json={tmp_path / 'plan.json'}")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["model"]["adapter"] == str(GOLDEN / "adapter")
    done = run("checkpoint", "convert", f"--plan={tmp_path / 'plan.json'}", f"--to={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert f"{GOLDEN} with the adapter {GOLDEN / 'adapter'} written to {tmp_path / 'out'}" in done.stdout + done.stderr
    expected = merge(BASE, STORED, lambda module: 2)
    written = read_folder(tmp_path / "out")
    assert written.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(written[name], values.astype(np.float32), err_msg=name)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_the_schedule_has_what_was_saved_whole(tmp_path):
    """A tensor of the adapter is read in place of that of the checkpoint."""
    tensors = STORED | {f"{PREFIX}lm_head.weight": np.zeros((72, 32), np.float16)}
    adapter = write_adapter(tmp_path / "adapter", tensors, **QV, modules_to_save=["lm_head"])
    sizes = []
    for path in (None, adapter):
        own = [] if path is None else [f"--model.adapter={path}"]
        settings = [
            "--hardware.slice=cpu-8",
            "--workload.batch=8",
            "--workload.position=8",
            f"--json={tmp_path / 's.json'}",
        ]
        done = run("checkpoint", f"--model={GOLDEN}", "--schedule", *own, *settings)
        assert done.returncode == 0, done.stderr
        sizes.append(json.loads((tmp_path / "s.json").read_text())["checkpoint_bytes"])
    assert sizes[0] - sizes[1] == 72 * 32 * 2


def test_results_are_those_of_the_files_of_an_adapter(checkpoint, tmp_path):
    """A run goes on only with the same adapter; its files are compared, whatever their folder is called."""
    base = read_folder(checkpoint)
    shape = base["model.layers.0.self_attn.q_proj.weight"].shape
    layers = sum(name.endswith("q_proj.weight") for name in base)
    tensors = matrices({f"model.layers.{i}.self_attn.q_proj": shape for i in range(layers)})
    adapter = write_adapter(tmp_path / "adapter", tensors)
    own = [f"--model.ref={checkpoint}", f"--data.path={checkpoint / 'text.jsonl'}", "--workload.batch=4"]
    own += ["--workload.position=64", "--workload.param_dtype=float32", "--workload.compute_dtype=float32"]

    def evaluate(output, *adapted):
        return run("eval", *own, *adapted, f"--output={tmp_path / output}")

    def loss(output):
        return json.loads((tmp_path / output / "summary.json").read_text())["total"]["loss_per_token"]

    done = evaluate("adapted", f"--model.adapter={adapter}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "adapted" / "summary.json").read_text())
    assert summary["load"]["adapter"] == summary["plan"]["model"]["adapter"] == str(adapter)
    merged = write_stored(tmp_path / "merged", {}, json.loads((checkpoint / "config.json").read_text()))
    values = merge(base, tensors, lambda module: 2)
    save_file({name: each.astype(np.float32) for name, each in values.items()}, merged / "model.safetensors")
    for file in itertools.chain(checkpoint.glob("tokenizer*"), checkpoint.glob("special*")):
        shutil.copy(file, merged)
    done = run("eval", f"--model.ref={merged}", *own[1:], f"--output={tmp_path / 'expected'}")
    assert done.returncode == 0, done.stderr
    assert loss("adapted") == pytest.approx(loss("expected"), abs=2e-6)
    assert evaluate("adapted", f"--model.adapter={adapter.rename(tmp_path / 'moved')}").returncode == 0
    done = evaluate("adapted")
    assert done.returncode == 2 and "holds the results of another run: its adapter is" in done.stderr
    for name, change in (
        ("adapter_config.json", lambda data: data.replace(b'"lora_alpha": 8', b'"lora_alpha": 9')),
        ("adapter_model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    ):
        path = tmp_path / "moved" / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        done = evaluate("adapted", f"--model.adapter={tmp_path / 'moved'}")
        assert done.returncode == 2 and f"files of the adapter differ: adapter/{name}" in done.stderr
        path.write_bytes(before)
