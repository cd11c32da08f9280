"""The kinds of workloads, one row each, with the facts by which configurations, the search and reports decide.

What a kind computes is in `shardplan.steps`, a module for each. Imports no JAX, as configurations must not.
"""

from dataclasses import dataclass
from enum import StrEnum


class LogitBlocks(StrEnum):
    """Whether a step computes its logits in blocks of positions, whose number the planner chooses."""

    NONE = "none"
    """Blocks are never used: the step needs few logits, or Levanter divides them."""
    POSSIBLE = "possible"
    """Blocks are used if they make the step fit, or make it faster."""
    NEEDED = "needed"
    """Blocks are always used, so that logits take little memory."""


@dataclass(frozen=True)
class WorkloadKind:
    """The facts that distinguish a kind of workload."""

    name: str
    """The value of `workload.kind` that selects it."""
    activity: str
    """The use of this kind as a gerund, such as `scoring`, for sentences."""
    synonyms: tuple[str, ...]
    """Other names that users write."""
    is_training: bool = False
    """Whether a step computes gradients and updates the parameters."""
    is_scoring: bool = False
    """Whether a step computes scores of tokens, not their losses alone."""
    makes_tokens: bool = False
    """Whether the step is followed by steps on tokens that the model generates."""
    logit_blocks: LogitBlocks = LogitBlocks.NONE
    param_dtype: str = "bfloat16"
    """Default type of stored parameters."""


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
"""Value of `workload.kind` -> row of the kind."""
KIND_SYNONYMS: dict[str, str] = {}
"""Other name of a kind -> the kind's name."""
for _row in ROWS:
    KIND_SYNONYMS |= dict.fromkeys(_row.synonyms, _row.name)
