"""Training with adapters, averages, pairs or another optimizer: its memory, and what is not counted."""

import dataclasses
import functools

import pytest
from lint_trainers import LLAMA, only

from shardplan import config
from shardplan.levanter_config.programs import PROGRAMS
from shardplan.levanter_config.training_extras import TrainingExtras, parse_extras
from shardplan.lint.checks.training import adapter_bytes
from shardplan.lint.lint import lint_trainer, target_of


@functools.cache
def training_target():
    """The training of Llama-3.1-8B on eight devices."""
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v5p-16", "--workload.kind=train", "--workload.position=1024"]
    return target_of(config.parse_config(argv))


def train_8b(**extras):
    """Lint that training, in float32, with some of `TrainingExtras`."""
    changed = dataclasses.replace(training_target(), extras=TrainingExtras(**extras))
    return lint_trainer({"mp": "p=f32,c=bf16", "train_batch_size": 8}, changed)


PARAMETERS = 8_030_261_248
"""Parameters of Llama-3.1-8B."""
LORA_PARAMETERS = 20_971_520
"""Parameters of its adapters of rank 8 on all linear layers but the head, as PEFT counts them."""


@pytest.mark.slow
def test_an_average_is_one_more_copy_of_the_parameters():
    """Adam keeps two copies, an average is a third; `embed` is sharded over all eight devices."""
    plain, averaged = train_8b().plan.memory, train_8b(averages=True).plan.memory
    assert averaged.optimizer - plain.optimizer == pytest.approx(PARAMETERS * 4 / 8, rel=1e-3)
    assert averaged.peak - plain.peak == averaged.optimizer - plain.optimizer
    lion = train_8b(optimizer="lion").plan.memory
    assert lion.optimizer == pytest.approx(PARAMETERS * 4 / 8, rel=1e-3)


def test_only_adapters_have_gradients_and_optimizer_state():
    result = train_8b(adapter_key="lora", lora={"r": 8})
    memory, plain = result.plan.memory, train_8b().plan.memory
    adapters = adapter_bytes(result.plan, training_target().model, TrainingExtras(adapter_key="lora", lora={"r": 8}))
    assert LORA_PARAMETERS * 4 / 8 <= adapters <= LORA_PARAMETERS * 4
    assert memory.parameters == pytest.approx(PARAMETERS * 2 / 8 + adapters, rel=1e-3)  # frozen ones are in bfloat16
    assert memory.gradients == adapters and memory.optimizer == 2 * adapters and memory.cast_parameters == 0
    assert memory.peak < plain.peak - 2 * plain.parameters
    finding = only(result.findings, "not counted")
    assert (finding.severity, finding.where) == ("warning", ("lora",)) and "which is too high" in finding.text


def test_dpo_has_a_second_model_and_two_sequences_of_each_example():
    plain = train_8b().plan.memory
    pairs = train_8b(is_preference=True).plan.memory
    reference = train_8b(is_preference=True, has_reference=True)
    assert reference.plan.memory.peak - pairs.peak == pytest.approx(PARAMETERS * 2 / 8, rel=1e-3)
    assert pairs.activations > plain.activations and pairs.optimizer == plain.optimizer
    assert only(reference.findings, "not counted").where == ("reference",)


@pytest.mark.parametrize(
    ("extras", "where", "words"),
    [
        ({"optimizer": "muon"}, "optimizer.type", "with that of adamw, which is too high"),
        ({"optimizer": "kron"}, "optimizer.type", "with that of adamw, which is too low"),
        ({"quantization": True}, "trainer.quantization", "quantized matrix products are not counted"),
    ],
)
def test_what_is_not_counted_is_said(extras, where, words):
    finding = only(train_8b(**extras).findings, "not counted")
    assert finding.where == (where,) and words in finding.text


@pytest.mark.parametrize(
    ("sections", "program", "expected"),
    [
        ({"trainer": {"model_averaging": {"type": "ema"}}}, "train_lm", TrainingExtras(averages=True)),
        ({"lora": {"r": 4, "alpha": 8}}, "lora_lm", TrainingExtras(adapter_key="lora", lora={"r": 4})),
        (
            {"adapter": {"type": "lora"}},
            "train_lm",
            TrainingExtras(adapter_key="adapter", lora={}),
        ),
        ({"adapter": {"type": "none"}}, "train_lm", TrainingExtras()),
        ({"reference": {"type": "separate"}}, "train_dpo", TrainingExtras(is_preference=True, has_reference=True)),
        (
            {"reference": {"type": "adapter_base"}, "adapter": {"type": "lora", "r": 2}},
            "train_dpo",
            TrainingExtras(is_preference=True, adapter_key="adapter", lora={"r": 2}),
        ),
        ({"optimizer": {"type": "lion"}}, "train_lm", TrainingExtras(optimizer="lion")),
        ({"trainer": {"model_averaging": {"type": "ema"}}}, "eval_lm", TrainingExtras()),
    ],
)
def test_extras_of_a_file(sections, program, expected):
    (chosen,) = (each for each in PROGRAMS if each.name == program)
    assert parse_extras(sections, chosen) == expected
