"""Levanter's own parser decides which files start; draccus, called on the same files in this process, is the oracle."""

import dataclasses
import importlib
import sys
import types
from dataclasses import dataclass, field

import draccus
import pytest
import yaml
from draccus.cfgparsing import load_config

from shardplan.hardware import parse_slice
from shardplan.levanter_config.flat_schema import convert_sections, old_keys
from shardplan.levanter_config.programs import PROGRAMS, choose_program
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.lint.parser import worker
from shardplan.lint.parser.corrections import correct_sections
from shardplan.lint.parser.problem import ParserVerdict, Problem, ProblemKind
from shardplan.lint.parser.run_worker import LevanterParser, ParserStopped, shared_parser

PROGRAM = {program.name: program for program in PROGRAMS}

STARTS = {
    "empty": "{}",
    "pretraining": """
        data:
          tokenizer: gpt2
          cache_dir: gs://bucket/cache
          components:
            web: {source: {type: hf, id: org/web}}
            code: {source: {type: url, train_urls: ["gs://bucket/code-*.jsonl.gz"]}, tags: [code]}
          train_weights: {web: 0.9, code: 0.1}
        model: {type: llama, hidden_dim: 1024, intermediate_dim: 4096, num_layers: 12, num_heads: 16, num_kv_heads: 8,
                max_seq_len: 2048, gradient_checkpointing: recompute}
        trainer:
          mp: p=f32,c=bf16
          tracker: {type: wandb, project: p, tags: [a]}
          num_train_steps: 1000
          train_batch_size: 256
          checkpointer: {base_path: gs://bucket/c, save_interval: 30m, keep: [{every: 500}]}
        optimizer: {type: adam, learning_rate: 3e-4, weight_decay: 0.1, warmup: 0.05, lr_schedule: cosine}
        """,
    "gemma in float32": "{model: {type: gemma, hidden_dim: 2048, num_heads: 8}, trainer: {mp: f32}, optimizer: {}}",
    "mixtral": "{model: {type: mixtral, n_routed_experts: 8, num_experts_per_tok: 2}, optimizer: {type: lion}}",
    "gpt2": "{model: {type: gpt2, gradient_checkpointing: true, layer_norm_epsilon: 1e-6}, optimizer: {}}",
    "qwen with rope": "{model: {type: qwen3, rope: {type: llama3, factor: 8}}, optimizer: {}}",
    "schedule": "{trainer: {train_batch_size: [{start: 0, value: 64}, {start: 100, value: 128}]}, optimizer: {}}",
    "two trackers": "{trainer: {tracker: [{type: wandb}, {type: tensorboard, logdir: logs}]}, optimizer: {}}",
    "mesh over slices": """
        trainer:
          mesh:
            axes: {replica: 1, data: -1, model: 4}
            dcn_axes: {replica_dcn: -1}
            compute_mapping: {batch: [replica_dcn, replica, data]}
            param_mapping: {embed: [replica, data]}
        optimizer: {}
        """,
    "average": "{trainer: {model_averaging: {type: ema, beta: 0.99}}, optimizer: {}}",
    "continued": "{initialize_from_hf: org/model, use_hf_model_config: true, hf_save_steps: 10, optimizer: {}}",
    "profiler and watch": """
        trainer:
          profiler: {enabled: true, start_step: 5, num_steps: 10}
          watch: {interval: 100}
          jax_config: {jax_softmax_custom_jvp: true}
          distributed: {coordinator_address: "localhost:1234", num_processes: 2, process_id: 0}
        optimizer: {}
        """,
    "harness": "{eval_harness: {task_spec: [{task: hellaswag, num_fewshot: 5}], max_examples: 10}, optimizer: {}}",
    "adapter": "{adapter: {type: lora, r: 16, target_modules: [q_proj, v_proj]}, optimizer: {}}",
}
"""Files of train_lm that Levanter parses, by what is in them."""
FAILS = {
    "key of the model": ("{model: {type: llama, num_layrs: 3}}", ["unknown key model.num_layrs"]),
    "keys of several sections": (
        "{modle: {}, optimizer: {lr: 1}, data: {tokeniser: gpt2}, trainer: {seeed: 1, checkpointer: {bas_path: x}}}",
        [
            "unknown key data.tokeniser", "unknown key trainer.checkpointer.bas_path", "unknown key trainer.seeed",
            "unknown key optimizer.lr", "unknown key modle",
        ],
    ),
    "type of the model": ("{model: {type: lama}}", ["unknown type model"]),
    "model without a type": ("{model: {hidden_dim: 8}}", ["missing key model.type"]),
    "type of the optimizer": ("{optimizer: {type: adma}}", ["unknown type optimizer"]),
    "type of a tracker in a list": (
        "{trainer: {tracker: [{type: wandb}, {type: wnb}]}}", ["unknown type trainer.tracker.1"],
    ),
    "number": ("{optimizer: {learning_rate: fast}}", ["value optimizer.learning_rate"]),
    "whole number": ("{trainer: {num_train_steps: 1.5}}", ["value trainer.num_train_steps"]),
    "profiler": ("{trainer: {profiler: false}}", ["value trainer.profiler"]),
    "heads": ("{model: {type: llama, num_heads: 5, num_kv_heads: 2}}", ["value model"]),
    "policy": ("{trainer: {mp: 'p=f99'}}", ["value trainer.mp"]),
    "schedule": (
        "{trainer: {train_batch_size: [{start: 0, value: 8, stop: 4}]}}",
        ["unknown key trainer.train_batch_size.0.stop"],
    ),
    "source": (
        "{data: {components: {a: {source: {type: hf, id: x, idd: 3}}}}}", ["unknown key data.components.a.source.idd"],
    ),
    "seq_len": ("{model: {type: llama, seq_len: 8}}", ["unknown key model.seq_len"]),
    "checkpointing of gpt2": (
        "{model: {type: gpt2, gradient_checkpointing: nested}}", ["value model.gradient_checkpointing"],
    ),
    "section": ("{optimizer: 3}", ["value optimizer"]),
    "interval": ("{trainer: {checkpointer: {save_interval: often}}}", ["value trainer.checkpointer.save_interval"]),
}  # fmt: skip
"""Files that it does not parse: the file, and what is wrong with it."""


def levanter_parses(path, program, with_arguments=False):
    """Whether Levanter's program parses the file, as its own `main` does it; making its flags takes a second."""
    config_class = getattr(importlib.import_module(program.module), program.config_class)
    try:
        if with_arguments:
            draccus.parse(config_class=config_class, config_path=str(path), args=[])
        else:
            draccus.decode(config_class, load_config(path.read_text(), file=path) or {})
    except Exception:
        return False
    return True


@pytest.mark.parametrize("name", STARTS)
def test_files_that_levanter_parses(tmp_path, name):
    path = tmp_path / "file.yaml"
    path.write_text(STARTS[name])
    assert levanter_parses(path, PROGRAM["train_lm"], with_arguments=name == "pretraining")
    assert shared_parser().parse(path.read_text(), PROGRAM["train_lm"]) == ParserVerdict(())


@pytest.mark.parametrize("name", FAILS)
def test_files_that_levanter_does_not_parse(tmp_path, name):
    """All problems are reported, and a file without them starts, where each can be corrected by itself."""
    text, expected = FAILS[name]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert not levanter_parses(path, PROGRAM["train_lm"], with_arguments=name == "keys of several sections")
    verdict = shared_parser().parse(text, PROGRAM["train_lm"])
    assert [f"{problem.kind} {'.'.join(problem.path)}" for problem in verdict.problems] == expected
    corrected = correct_sections(yaml.safe_load(text), verdict, PROGRAM["train_lm"])
    is_trainer_key = any(text.startswith("unknown key trainer.") and text.count(".") == 1 for text in expected)
    if corrected.is_complete and not is_trainer_key:
        assert shared_parser().parse_values(corrected.sections, PROGRAM["train_lm"]).starts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("eval_lm", "{hf_checkpoint: org/model, max_eval_length: 1024, trainer: {per_device_eval_parallelism: 4}}"),
        ("sample_lm", "{hf_checkpoint: org/model, max_new_tokens: 10, engine: {max_seq_len: 512}}"),
        ("lora_lm", "{initialize_from_hf: org/model, lora: {r: 8, alpha: 8.0}, optimizer: {}}"),
        ("train_dpo", "{reference: {type: separate, model_path: org/model}, beta: 0.2, optimizer: {}}"),
        ("lora_dpo", "{initialize_from_hf: org/model, beta: 0.1, lora: {r: 8}, optimizer: {}}"),
        ("viz_logprobs", "{checkpoint_path: gs://bucket/c, num_docs: 4}"),
    ],
)
def test_files_of_other_programs(tmp_path, name, text):
    path = tmp_path / "file.yaml"
    path.write_text(text)
    program = choose_program(yaml.safe_load(text)).program
    assert program.name == name and levanter_parses(path, program)
    assert shared_parser().parse(text, program).starts
    assert not shared_parser().parse("{qqq: 1}", program).starts


def test_programs_have_the_keys_of_levanter():
    for program in PROGRAMS:
        try:
            module = importlib.import_module(program.module)
        except ModuleNotFoundError:
            assert not shared_parser().parse("{}", program).is_program_installed
            continue
        names = {item.name for item in dataclasses.fields(getattr(module, program.config_class))}
        assert names <= program.keys, program.name


@pytest.mark.parametrize(
    ("sections", "name", "evidence"),
    [
        ({"trainer": {}, "optimizer": {}}, "train_lm", ("optimizer",)),
        ({"trainer": {"num_train_steps": 10}, "model": {}}, "train_lm", ("trainer.num_train_steps",)),
        ({"trainer": {"train_batch_size": [{"start": 0, "value": 8}]}}, "train_lm", ("trainer.train_batch_size",)),
        ({"trainer": {}, "max_eval_length": 8}, "eval_lm", ("max_eval_length",)),
        ({"trainer": {}, "prompts": []}, "sample_lm", ("prompts",)),
        ({"trainer": {}, "supervised_data": {}, "messages_field": "m"}, "sft", ("supervised_data", "messages_field")),
        ({"trainer": {"mp": "bf16"}, "model": {}}, "eval_lm", ()),
    ],
)
def test_program_of_a_file(sections, name, evidence):
    choice = choose_program(sections)
    assert (choice.program.name, choice.evidence) == (name, evidence)


def test_the_kind_that_the_user_asks_for_decides():
    assert choose_program({"trainer": {}, "optimizer": {}}, "eval", True).program.name == "eval_lm"
    assert choose_program({"trainer": {}}, "train", True).program.name == "train_lm"
    assert choose_program({"trainer": {}}, "eval", False, ("train_config",)).program.name == "train_lm"


OLD_FILE = """
data: {id: org/text, tokenizer: gpt2, cache_dir: gs://bucket/cache}
model: {type: llama, seq_len: 1024}
trainer:
  mp: p=f32,c=bf16
  model_axis_size: 4
  fsdp_axis: [embed, vocab]
  tensor_parallel_axes: [mlp, heads]
  train_batch_size: 64
  profiler: true
  profiler_num_steps: 20
  ray: {auto_start_cluster: false}
optimizer: {learning_rate: 1e-3}
"""


@pytest.mark.parametrize(
    ("hardware", "mesh"),
    [("v4-64", {"replica": 1, "data": 8, "model": 4}), ("2xv4-64", {"replica": 1, "data": 16, "model": 4})],
)
def test_converted_sections_start_and_shard_alike(hardware, mesh):
    """Of a file of levanter 1.2 every section is converted, so that the installed Levanter parses it."""
    sections, slice_ = yaml.safe_load(OLD_FILE), parse_slice(hardware)
    assert not shared_parser().parse(OLD_FILE, PROGRAM["train_lm"]).starts
    converted = convert_sections(sections, slice_)
    assert [*converted] == [*sections]
    assert old_keys(sections) == [
        "trainer.model_axis_size", "trainer.fsdp_axis", "trainer.tensor_parallel_axes", "trainer.profiler_num_steps",
        "trainer.ray", "trainer.profiler", "model.seq_len", "data.id",
    ]  # fmt: skip
    assert old_keys(converted) == []
    assert shared_parser().parse_values(converted, PROGRAM["train_lm"]) == ParserVerdict(())
    section = parse_trainer_section(converted["trainer"], slice_.devices, slice_.slices)
    assert section.mesh == mesh and section.batch == 64
    assert section.compute_mapping == {"mlp": ["model"], "heads": ["model"], "batch": ["replica", "data"]}
    assert section.param_mapping == {"mlp": ["model"], "heads": ["model"], "embed": ["data"], "vocab": ["data"]}


def test_what_is_not_installed_is_no_problem_of_the_file(monkeypatch):
    """A class that cannot import what it needs says nothing about the file; other problems are reported beside it."""

    @dataclass
    class Plugin:
        name: str = "x"

        def __post_init__(self):
            raise ModuleNotFoundError("No module named 'some_tracker'", name="some_tracker")

    @dataclass
    class Config:
        tracker: Plugin | None = None
        steps: int = 1
        seed: int = field(default=0)

    program = types.ModuleType("program_of_a_test")
    program.Config = Config
    monkeypatch.setitem(sys.modules, "program_of_a_test", program)
    monkeypatch.setitem(globals(), "Plugin", Plugin)
    Config.__annotations__["tracker"] = Plugin | None
    verdict = worker.parse("{tracker: {name: y}, steps: many}", [], "program_of_a_test", "Config")
    assert [(problem.kind, problem.path) for problem in verdict.problems] == [
        (ProblemKind.NOT_INSTALLED, ("tracker",)),
        (ProblemKind.VALUE, ("steps",)),
    ]
    assert not verdict.starts
    assert worker.parse("{tracker: {name: y}}", [], "program_of_a_test", "Config").starts


def test_corrections_are_lines_of_a_diff():
    sections = {"model": {"type": "lama", "hidden_dimm": 64, "qqq": 1}, "optimizer": {"learning_rate": "fast"}}
    problems = (
        Problem(ProblemKind.UNKNOWN_TYPE, ("model",), "there is no type 'lama'", ("gpt2", "llama")),
        Problem(ProblemKind.UNKNOWN_KEY, ("model", "hidden_dimm"), "", ("hidden_dim", "type")),
        Problem(ProblemKind.UNKNOWN_KEY, ("model", "qqq"), "", ("hidden_dim", "type")),
        Problem(ProblemKind.VALUE, ("optimizer", "learning_rate"), "Couldn't parse 'fast' into a float"),
    )
    corrected = correct_sections(sections, ParserVerdict(problems), PROGRAM["train_lm"])
    assert corrected.sections == {"model": {"type": "llama", "hidden_dim": 64}, "optimizer": {}}
    assert corrected.lines == (
        "-model.type: lama", "+model.type: llama", "-model.hidden_dimm: 64", "+model.hidden_dim: 64", "-model.qqq: 1",
        "-optimizer.learning_rate: fast",
    )  # fmt: skip
    assert corrected.is_complete and corrected.edits == 4
    assert [(finding.text, finding.remedy) for finding in corrected.findings] == [
        ("Levanter does not start: there is no type 'lama' for model", "did you mean 'llama'?"),
        ("Levanter has no key 'hidden_dimm' in model and does not start", "did you mean 'hidden_dim'?"),
        ("Levanter has no key 'qqq' in model and does not start", "remove it"),
        (
            "Levanter does not take this value and does not start: Couldn't parse 'fast' into a float",
            "correct it, or leave it out for Levanter's default",
        ),
    ]


def test_a_key_that_the_section_has_is_not_what_another_one_meant():
    problem = Problem(ProblemKind.UNKNOWN_KEY, ("data_only",), "", ("data", "trainer"))
    corrected = correct_sections({"data": {}, "data_only": {}}, ParserVerdict((problem,)), PROGRAM["train_lm"])
    assert [finding.remedy for finding in corrected.findings] == ["remove it"]


def test_a_section_that_is_refused_as_a_whole_is_not_corrected():
    problem = Problem(ProblemKind.VALUE, ("model",), "num_heads=5 not divisible by num_kv_heads=2.")
    corrected = correct_sections({"model": {"num_heads": 5}}, ParserVerdict((problem,)), PROGRAM["train_lm"])
    assert not corrected.is_complete and corrected.lines == () and len(corrected.findings) == 1


def test_a_parser_that_ends_says_why(monkeypatch, raises_message):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with LevanterParser() as parser, raises_message(ParserStopped):
        parser.parse("{}", PROGRAM["train_lm"])
