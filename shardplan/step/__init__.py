"""The programs that run on the devices: evaluation, train step, prefill. What is run is what is verified."""

from shardplan.step.program import Program, abstract_model, abstract_tokens
from shardplan.step.programs import logits_program, loss_program, prefill_program, step_program, train_program
from shardplan.step.specialize import specialize

__all__ = [
    "Program",
    "abstract_model",
    "abstract_tokens",
    "logits_program",
    "loss_program",
    "prefill_program",
    "specialize",
    "step_program",
    "train_program",
]
