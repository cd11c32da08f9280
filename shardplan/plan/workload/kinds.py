"""The kinds of workloads: a row for each, with what configurations, the search and reports decide by.

What a kind computes is in `shardplan.steps`, a module for each. Imports no JAX, as configurations must not.
"""

from dataclasses import dataclass
from enum import StrEnum


class LogitBlocks(StrEnum):
    """Whether a step computes its logits in blocks of positions; the planner chooses how many."""

    NONE = "none"
    """It needs few logits, or Levanter divides them."""
    POSSIBLE = "possible"
    """Where blocks make it fit, or faster."""
    NEEDED = "needed"
    """So that logits are small beside everything else."""


@dataclass(frozen=True)
class WorkloadKind:
    """What sets a kind of workload apart from the others."""

    name: str
    """The value of `workload.kind`."""
    activity: str
    """What a user does with it, for sentences."""
    synonyms: tuple[str, ...]
    """What else users call it."""
    is_training: bool = False
    """Whether a step computes gradients and updates the parameters."""
    is_scoring: bool = False
    """Whether a step computes scores of tokens, not their losses alone."""
    makes_tokens: bool = False
    """Whether the step begins work that goes on with tokens that the model itself makes."""
    logit_blocks: LogitBlocks = LogitBlocks.NONE
    param_dtype: str = "bfloat16"
    """The type of stored parameters where a workload names none."""


ROWS = (
    WorkloadKind(
        "eval", "evaluation", ("evaluation", "evaluate", "loss"), logit_blocks=LogitBlocks.POSSIBLE,
    ),
    WorkloadKind("prefill", "sampling", ("inference",), makes_tokens=True),
    WorkloadKind(
        "score", "scoring", ("extraction", "scoring"), is_scoring=True, logit_blocks=LogitBlocks.NEEDED,
    ),
    # updates of an optimizer are smaller than the steps of bfloat16
    WorkloadKind(
        "train", "training", ("training", "pretrain", "finetune", "sft"), is_training=True, param_dtype="float32",
    ),
)  # fmt: skip
KINDS = {row.name: row for row in ROWS}
"""Value of `workload.kind` -> its kind."""
KIND_SYNONYMS: dict[str, str] = {}
"""What else users call a kind of workload -> its name here."""
for _row in ROWS:
    KIND_SYNONYMS |= dict.fromkeys(_row.synonyms, _row.name)
