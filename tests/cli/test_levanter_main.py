"""`levanter.main.eval_lm` and `train_lm`, as they are, with a planned trainer section and with checkpoints streamed."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT, run, word_tokenizer
from processes import fork_python
from safetensors.numpy import load_file

LENGTH, BATCH = 64, 8
PLANNING = (
    "--hardware.slice=cpu-8", f"--workload.batch={BATCH}", f"--workload.position={LENGTH}", "--mesh.model=2",
    "--workload.param_dtype=float32", "--workload.compute_dtype=float32",
)  # fmt: skip
SIZES = {
    "type": "llama", "max_seq_len": LENGTH, "hidden_dim": 96, "intermediate_dim": 128, "num_layers": 2, "num_heads": 12,
    "num_kv_heads": 4, "layer_norm_epsilon": 1e-6,
}  # fmt: skip
VARIABLES = {"JAX_NUM_CPU_DEVICES": "8", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def write_config(golden, tmp_path_factory):
    """Write a configuration of Levanter, for a Llama, with the trainer section that is printed for a kind of step."""
    folder = tmp_path_factory.mktemp("levanter")
    section = {**SIZES, "reference_checkpoint": str(folder), "tokenizer": str(folder)}
    return config_writer(folder, golden / "llama", section)


@pytest.fixture(scope="module")
def write_decoder_config(golden, tmp_path_factory):
    """The same for a Pythia, whose section names its checkpoint alone."""
    folder = tmp_path_factory.mktemp("levanter")
    section = {"type": "shardplan_decoder", "reference_checkpoint": str(folder)}
    return config_writer(folder, golden.with_name("families") / "gpt_neox", section)


def config_writer(folder, checkpoint, model_section):
    """Make a folder with a checkpoint, a tokenizer and texts, and a function that writes a configuration there."""
    vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    word_tokenizer(0).save(str(folder / "tokenizer.json"))
    tokens = '"bos_token": "t1", "eos_token": "t2"'
    (folder / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "PreTrainedTokenizerFast", {tokens}}}')
    for path in checkpoint.glob("*.*"):
        (folder / path.name).symlink_to(path)
    rng = np.random.default_rng(0)
    for name, documents in (("train", 100), ("validation", 24)):
        texts = (
            " ".join(f"t{token}" for token in rng.integers(3, vocab, rng.integers(20, 200))) for _ in range(documents)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def write(kind, name, *settings, **trainer):
        argv = (f"--model.config={checkpoint / 'config.json'}", *PLANNING, f"--workload.kind={kind}", *settings)
        done = run("plan", *argv, "--parameters")
        assert done.returncode == 0, done.stderr
        section = yaml.safe_load(done.stdout[done.stdout.index("\ntrainer:") :].split("\n\n")[0])["trainer"]
        section |= {"require_accelerator": False, "tracker": {"type": "json_logger"}, "log_dir": str(folder / "logs")}
        urls = {f"{name}_urls": [str(folder / f"{name}.jsonl")] for name in ("train", "validation")}
        data = {"components": {"text": {"source": {"type": "url", **urls}}}}
        content = {
            "model": model_section,
            "data": {"tokenizer": str(folder), "cache_dir": str(folder / "cache"), **data},
            "trainer": {**section, **trainer},
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


def command(script, path, *argv, streamed=True):
    """Arguments of Python for a script of Levanter, with checkpoints streamed by shardplan or read by Levanter."""
    start = [ROOT / "scripts" / "levanter_main.py", script] if streamed else ["-m", f"levanter.main.{script}"]
    return [*start, "--config_path", path, *argv]


def logged(line):
    """The metrics, with their step, that a line of the log has; None if it has none."""
    start = line.find('{"')
    content = json.loads(line[start:]) if start >= 0 and line.rstrip().endswith("}") else {}
    return {**content.get("metrics", {}), "step": content.get("step")} if "metrics" in content else None


def test_evaluation_has_the_same_loss_with_either_loader(write_config):
    path = write_config("eval", "eval", "--pin=vocab=")  # or Levanter's own loss would be wrong
    losses = []
    for streamed in (True, False):
        argv = ("--hf_checkpoint", str(path.parent), "--max_eval_length", str(LENGTH))
        process = fork_python(command("eval_lm", path, *argv, streamed=streamed), path.parent, **VARIABLES)
        texts = process.communicate()
        assert process.returncode == 0, texts
        assert any("loaded 0.66 MiB" in text for text in texts) == streamed
        losses += [line for text in texts for line in text.splitlines() if line.startswith("Loss:")]
    assert len(losses) == 2 and losses[0] == losses[1]
    assert 4 < float(losses[0].removeprefix("Loss:")) < 7


@pytest.mark.whole
@pytest.mark.parametrize("steps", [12, 50])
def test_training_resumes_with_the_same_losses(write_config, steps):
    """A run that is killed shortly before its end goes on from its checkpoint, and has the same losses again."""
    checkpoints = {"base_path": "checkpoints", "keep": [{"every": steps // 3}]}
    path = write_config("train", "train", id=f"{steps}-steps", num_train_steps=steps, checkpointer=checkpoints)

    def train(stop_at=None):
        process = subprocess.Popen(
            [sys.executable, *command("train_lm", path, "--initialize_from_hf", str(path.parent))],
            cwd=path.parent, env={**os.environ, **VARIABLES}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        losses, lines = {}, []
        for line in process.stdout:
            lines.append(line)
            metrics = logged(line)
            if metrics and "train/loss" in metrics:
                losses[metrics["step"]] = metrics["train/loss"]
                if metrics["step"] == stop_at:
                    process.kill()
        assert process.wait() == (0 if stop_at is None else -9), "".join(lines)
        return losses

    before, after = train(stop_at=steps - 2), train()
    assert 0 < min(after) < steps - 2 and {*before, *after} == {*range(steps)}
    again = before.keys() & after.keys()
    assert {step: after[step] for step in again} == {step: before[step] for step in again}


@pytest.mark.whole
def test_a_decoder_is_evaluated_trained_and_exported(write_decoder_config):
    """A section that names a checkpoint is all that Levanter's programs need; what they export has its tensors."""
    checkpoints = {"base_path": "checkpoints"}
    path = write_decoder_config("train", "train", id="decoder", num_train_steps=10, checkpointer=checkpoints)
    folder = path.parent

    def run_program(script, *argv):
        process = fork_python(command(script, path, *argv), folder, **VARIABLES)
        texts = process.communicate()
        assert process.returncode == 0, texts
        return [line for text in texts for line in text.splitlines()]

    def evaluated_loss(checkpoint):
        lines = run_program("eval_lm", "--hf_checkpoint", str(checkpoint), "--max_eval_length", str(LENGTH))
        return next(float(line.removeprefix("Loss:")) for line in lines if line.startswith("Loss:"))

    before = evaluated_loss(folder)
    lines = run_program("train_lm", "--initialize_from_hf", "true", "--hf_save_path", str(folder / "exported"))
    metrics = [each for each in map(logged, lines) if each]
    assert any(each.get("throughput/gflops_per_second", 0) > 0 for each in metrics)  # of `flops_per_token`
    (exported,) = (folder / "exported").glob("*/*")
    original, trained = (load_file(each / "model.safetensors") for each in (folder, exported))
    parameters = {key for key in original if not key.endswith((".attention.bias", ".masked_bias", ".inv_freq"))}
    assert trained.keys() == parameters
    assert all(trained[key].shape == original[key].shape for key in parameters)
    assert evaluated_loss(exported) < before
