"""The programs that run on the devices: evaluation, train step, prefill. `verify` compiles the same programs."""

from shardplan.step.aot_program import Program, abstract_model, abstract_tokens
from shardplan.step.specialize import specialize
from shardplan.step.step_programs import (
    logits_program,
    loss_program,
    prefill_program,
    score_program,
    step_program,
    train_program,
)

__all__ = [
    "Program",
    "abstract_model",
    "abstract_tokens",
    "logits_program",
    "loss_program",
    "prefill_program",
    "score_program",
    "specialize",
    "step_program",
    "train_program",
]
