"""`shardplan train`: its configuration, what it refuses, and what a dry run writes."""

import json

import pytest
import yaml
from conftest import ROOT, fails, run

CONFIG = "--config=configs/tiny-train.yaml"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trainer.train_batch_size=8"],
         "command line: trainer.train_batch_size is not for a file of train: set workload.batch"),
        (["--trainer.mesh.axes.data=8"],
         "command line: trainer.mesh.axes.data is not for a file of train: the plan decides the mesh and its mappings; "
         "set sizes with mesh, or pin"),
        (["--train_seq_len=8"], "command line: train_seq_len is not for a file of train: set workload.position"),
        (["--trainer.load_checkpoint=true"],
         "command line: trainer.load_checkpoint is not for a file of train: a run goes on in its output folder; start "
         "from another one with trainer.initialize_from"),
        (["--hf_save_pth=x"], "command line: unknown key 'hf_save_pth'; did you mean 'hf_save_path'?"),
        (["--optimiser.learning_rate=1"],
         "command line: unknown key 'optimiser.learning_rate'; did you mean 'optimizer.learning_rate'?"),
        (["--trainer.seed"], "command line: trainer.seed has no value; write --trainer.seed VALUE"),
        (["--workload.kind=eval"], "workload.kind is eval, and this command trains; leave it out"),
        (["--data.path=x.txt"], "command line: data.path is a key of eval, launch, doctor, not of train; leave it out"),
        (["--config=configs/tiny.yaml", "--workload.kind=train"],
         "data.path names texts to evaluate; to train on texts, set Levanter's data.components"),
        (["--model.adapter=x"],
         "model.adapter is for evaluation; to train a LoRA adapter, set Levanter's adapter.type"),
        (["--load.gib=4"],
         "the section load is for evaluation, and Levanter's training loads weights by itself"),
        (["--tracker.kind=json", "--trainer.tracker.type=noop"],
         "tracker and trainer.tracker both say where metrics go; leave one of them out"),
        (["--initialize_from_hf=true"], "initialize_from_hf is true, and model.ref is not set; name a checkpoint"),
        (["--workload.optimizer=lion"],
         "workload.optimizer is lion, and optimizer.type is adam (as adamw of optax); leave workload.optimizer out"),
        (["--trainer.num_train_step=5"],
         "trainer.num_train_step: Levanter has no such key; did you mean 'num_train_steps'?"),
        (["--trainer.checkpointer.save_intervall=5m"],
         "trainer.checkpointer.save_intervall: Levanter has no such key; did you mean 'save_interval'?"),
        (["--optimizer.learning_rate=fast"],
         "optimizer.learning_rate: Couldn't parse 'fast' into a float; correct it, or leave it out for "
         "Levanter's default"),
        (["--data.components.text.source.type=url"],
         "data.tokenizer is not set; name a tokenizer, whose tokens the model has"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, argv, message):
    fails(run("train", CONFIG, "--dry_run", "--output", tmp_path / "r", *argv), 2, f"shardplan train: {message}")
    assert not (tmp_path / "r").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainer: {mp: f32}", "trainer.mp is not for a file of train: set workload.param_dtype and workload.comp"),
        ("optimizr: {lr: 1}", "unknown key 'optimizr.lr'; did you mean 'optimizer.lr'?"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_text(f"hardware: {{slice: cpu-8}}\n{content}\n")
    done = run("train", "--config", path, "--dry_run")
    assert done.returncode == 2 and f"{path}: {message}" in done.stderr, done.stderr


def test_a_plan_with_attention_that_levanter_lacks(tmp_path):
    plan = tmp_path / "plan.json"
    workload = ("--workload.batch=1", "--workload.position=128", "--mesh.data=8")
    done = run("plan", CONFIG, *workload, "--json", plan)
    assert done.returncode == 0, done.stderr
    values = json.loads(plan.read_text())
    assert values["attention"]["strategy"] != "none"
    done = run("train", "--plan", plan, "--model.config=configs/tiny-train.json", "--dry_run")
    assert done.returncode == 2
    assert "order, and Levanter's Trainer computes its own, in the order of the sequence; leave plan" in done.stderr


def test_a_dry_run_writes_the_file_that_levanter_takes(tmp_path):
    argv = ("--trainer.num_train_steps=7", "--hf_save_path", tmp_path / "hf", "--optimizer.type=lion")
    done = run("train", CONFIG, "--dry_run", "--output", tmp_path / "r", *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits cpu-8") and f"levanter.yaml written to {tmp_path / 'r'}" in done.stderr
    values = yaml.safe_load((tmp_path / "r" / "levanter.yaml").read_text())
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert plan["workload"]["kind"] == "train" and plan["workload"]["optimizer"] == "lion"
    trainer = values["trainer"]
    assert trainer["num_train_steps"] == 7 and trainer["train_batch_size"] == 24 and trainer["steps_per_eval"] == 25
    assert trainer["checkpointer"] == {
        "base_path": f"{tmp_path}/r/checkpoints", "append_run_id_to_base_path": False, "keep": [{"every": 10}]
    }  # fmt: skip
    assert values["model"]["type"] == "llama" and values["model"]["gradient_checkpointing"] is True
    assert values["initialize_from_hf"] is False and values["hf_save_path"] == f"{tmp_path / 'hf'}"
    assert values["data"]["components"]["synthetic"]["vocab_size"] == 512
    assert {path.name for path in (tmp_path / "r" / "model").iterdir()} == {
        "config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip


def test_the_plan_of_70b_is_a_configuration_of_train(tmp_path):
    """Weights come from the checkpoint that it names, and gradient checkpointing is that of the plan."""
    argv = ("--workload.gradient_checkpointing=nested", "--trainer.num_train_steps=7")
    done = run("train", "--config=configs/70b-train.yaml", "--dry_run", "--output", tmp_path / "r", *argv)
    assert done.returncode == 0, done.stderr
    values = yaml.safe_load((tmp_path / "r" / "levanter.yaml").read_text())
    assert values["initialize_from_hf"] == values["model"]["reference_checkpoint"] == "meta-llama/Llama-3.1-70B"
    assert values["model"]["gradient_checkpointing"] == "nested" and values["trainer"]["require_accelerator"]
    assert values["train_seq_len"] == 8192


def test_a_model_that_levanter_does_not_have(tmp_path):
    path = ROOT / "tests" / "golden" / "families" / "gpt_neox" / "config.json"
    argv = ("--model.config", path, "--workload.position=16")
    done = run("train", CONFIG, "--dry_run", "--output", tmp_path / "r", *argv)
    assert done.returncode == 0, done.stderr
    section = yaml.safe_load((tmp_path / "r" / "levanter.yaml").read_text())["model"]
    assert section["type"] == "shardplan_decoder" and section["hf_config"]["model_type"] == "gpt_neox"


def test_the_file_is_one_of_the_other_commands_too():
    """Levanter's sections are left out there."""
    done = run("plan", CONFIG)
    assert done.returncode == 0 and "train, batch 24 x 128 tokens" in done.stdout, done.stderr
