"""Trainer sections as tests lint them, and what is wrong with those of the repository."""

import functools
from pathlib import Path

import yaml

from shardplan import config
from shardplan.levanter_config.levanter_file import read_levanter_file
from shardplan.levanter_config.model_section import ModelSection
from shardplan.lint.lint import lint_trainer, target_of

ROOT = Path(__file__).parents[1]
LLAMA = "llama-3.1-8b"


@functools.cache
def target_8b(slice_name="v4-16", backend=None):
    """Llama-3.1-8B on a slice, evaluated in batches of 16 sequences."""
    argv = [f"--model.config={LLAMA}", f"--hardware.slice={slice_name}", "--workload.batch=16"]
    return target_of(config.parse_config(argv), ModelSection(attention_backend=backend))


def lint_8b(trainer, slice_name="v4-16", backend=None):
    """Lint a trainer section, given as YAML, for Llama-3.1-8B: 32 layers, 8 key heads of 4 query heads, mlp 14336.

    The types are bfloat16 unless the section has others.
    """
    values = yaml.safe_load(trainer)
    if isinstance(values, dict):
        values.setdefault("mp", "bf16")
    return lint_trainer(values, target_8b(slice_name, backend))


def only(findings, kind):
    (match,) = [finding for finding in findings if finding.kind == kind]
    return match


def kinds(result):
    return [(finding.severity, finding.kind) for finding in result.findings]


USUAL = """
mesh:
  axes: {model: 2}
  shared_mapping: {kv_head: model}
  param_mapping: {embed: data, vocab: model}
"""
EXPECTED_ERRORS = {
    "405b-everything-on-model": {"duplicate", "indivisible", "attention"},
    "405b-head-size": {"batch", "memory", "replicated", "barely sharded", "attention"},
    "405b-heads-mlp": {"heads", "memory", "replicated"},
    "405b-output-axes": set(),
    "405b-q-heads": {"attention"},
    "405b-sequence-share": set(),
    "405b-usual": set(),
}


def trainer_of(name):
    return read_levanter_file(str(ROOT / "configs" / "levanter" / f"{name}.yaml")).sections["trainer"]


def schedule_of(*sizes):
    return [{"start": 100 * index, "value": size} for index, size in enumerate(sizes)]


def seconds_per_sequence(result):
    """The estimated time of a linted section's step for each sequence of its batch."""
    return result.plan.cost.step_seconds / result.plan.workload.batch
