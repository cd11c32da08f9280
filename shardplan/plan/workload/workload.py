"""The workload: what one step computes, as a configuration requests it and as a Plan records it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardplan.errors import ConfigError, nearest
from shardplan.model.axes import MAX_SIZE
from shardplan.plan.workload.checkpointing import OPEN_CHECKPOINTING, CheckpointPolicy, checkpointing_problem
from shardplan.plan.workload.dtypes import DTYPE_SYNONYMS, DTYPES
from shardplan.plan.workload.kinds import KIND_SYNONYMS, KINDS, LogitBlocks, WorkloadKind

BATCH_AXIS = "batch"
"""Logical axis of the sequences of a step, named as in Levanter's trainer."""
LOGIT_BYTES = 256 * 2**20
"""Maximum bytes of float32 logits that a device holds at a time, if all devices share the logits."""
AUTO = "auto"
"""Metadata key of a field, for the value that `auto` stands for."""
AUTO_BATCH = -1
"""Batch that leaves the choice to the planner, written as Levanter does."""
AUTO_POSITION = -1
"""Position that leaves the sequence length to the windows."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Range of temperatures in which float32 logits determine the probabilities of tokens well enough."""
MAX_LOAD_SPREAD = 4.0
"""Largest spread of expert loads; if one of 256 experts had all tokens, the spread would be 16."""
MIN_POSITION = 2
"""Fewest tokens of a sequence, because a single one predicts nothing."""


@dataclass(frozen=True)
class Workload:
    """What one step computes."""

    kind: str = "eval"
    """What the plan is for: eval (the loss of every token), score (also the rank of every token and the probability of
    the top k), prefill, or train."""
    batch: int = field(default=8, metadata={AUTO: AUTO_BATCH})
    """Sequences per step, over all devices; auto for the number with most tokens per second that fits."""
    position: int = field(default=2048, metadata={AUTO: AUTO_POSITION})
    """Tokens per sequence; auto for the length that packed windows fill best. Default: at most the model's."""
    param_dtype: str = None  # type: ignore[assignment]  # text from __post_init__ on
    """Type of stored parameters, except routers (float32): bfloat16, float16, float32; default: float32 to train, else
    bfloat16."""
    compute_dtype: str = "bfloat16"
    """Type of activations and products: bfloat16, float16 or float32."""
    gradient_checkpointing: str = "default"
    """Activations that training keeps: default, recompute, nested, offload_carries, offload, save_all; auto to choose
    it for each activation. +NAME also keeps activations of a name, +NAME@host on the host."""
    microbatches: int | None = None
    """Parts of a training batch, one after the other; default: the fastest that fits."""
    optimizer: str = "adamw"
    """Name in optax; +ema adds averages, +mu_bfloat16 narrows moments."""
    top_k: int = 40
    """For score: most probable tokens written per position; 0 for none."""
    temperature: float = 1.0
    """For score: probabilities are those of softmax(logits / temperature)."""
    window: int | None = None
    """For score: tokens per window if several share a sequence; default: one window."""
    logit_blocks: int | None = None
    """For eval and score: blocks of positions whose logits are in memory in turn. Default: for score within 256 MiB per
    device, for eval the fastest that fits."""
    expert_load_spread: float = 0.0
    """How unevenly experts are used: standard deviation of their tokens, over the mean."""

    def __post_init__(self) -> None:
        if self.param_dtype is None:
            object.__setattr__(self, "param_dtype", self.kind_row.param_dtype)

    @property
    def kind_row(self) -> WorkloadKind:
        """Row of the workload's kind; an unknown name, which `problems` reports, has the row of an evaluation."""
        return KINDS.get(self.kind, KINDS["eval"])

    @property
    def is_training(self) -> bool:
        """Whether the step computes gradients and updates the parameters."""
        return self.kind_row.is_training

    @property
    def is_scoring(self) -> bool:
        """Whether the step computes scores of tokens rather than only their losses."""
        return self.kind_row.is_scoring

    @property
    def windows(self) -> int:
        """Windows per step, over all devices; the rest of each sequence is padding."""
        return self.batch * (self.position // (self.window or self.position))

    @property
    def tokens(self) -> int:
        """Tokens per step, over all devices."""
        return self.batch * self.position

    @property
    def has_logit_blocks(self) -> bool:
        """Whether the planner chooses blocks for the step's logits; in training, Levanter does."""
        return self.kind_row.logit_blocks is not LogitBlocks.NONE

    @property
    def num_logit_blocks(self) -> int:
        """Number of logit blocks; 1 if the workload leaves it open."""
        return self.logit_blocks or 1

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches; 1 if the workload leaves it open."""
        return self.microbatches or 1

    @property
    def checkpoint_policy(self) -> CheckpointPolicy:
        """Gradient checkpointing policy; Levanter's default if the workload leaves it open."""
        if self.gradient_checkpointing == OPEN_CHECKPOINTING:
            return CheckpointPolicy()
        return CheckpointPolicy.parse(self.gradient_checkpointing)

    def resolve(self) -> "Workload":
        """Return the workload with Levanter's defaults for open settings."""
        return replace(self, gradient_checkpointing=str(self.checkpoint_policy), microbatches=self.num_microbatches)

    def with_logit_blocks(self, vocab: int, devices: int) -> "Workload":
        """Return this workload with the number of its logit blocks, for `vocab` tokens and a number of devices."""
        if not self.has_logit_blocks or self.logit_blocks is not None:
            return self
        total = self.tokens * vocab * 4
        fitting = (n for n in range(1, self.position) if self.position % n == 0 and total / n <= devices * LOGIT_BYTES)
        return replace(self, logit_blocks=next(fitting, self.position))

    def settings_text(self) -> str:
        """Format the settings of a step in words; empty if there are none to mention."""
        if not self.is_training:
            return f"logits in {self.logit_blocks} blocks of positions" if self.num_logit_blocks > 1 else ""
        resolved = self.resolve()
        parts = "one microbatch" if resolved.microbatches == 1 else f"{resolved.microbatches} microbatches"
        return f"{self.optimizer}, {parts}, gradient checkpointing {resolved.gradient_checkpointing}"

    def problems(self) -> Iterator[str]:
        """Yield an error for every value that no step can have."""
        for key, value, minimum in (
            ("batch", self.batch, 1), ("position", self.position, MIN_POSITION), ("microbatches", self.microbatches, 1),
        ):  # fmt: skip
            is_open = (key, value) in (("batch", AUTO_BATCH), ("position", AUTO_POSITION))
            if value is not None and not is_open and not minimum <= value <= MAX_SIZE:
                bound = f"at most {MAX_SIZE}" if value > MAX_SIZE else f"at least {minimum}"
                yield f"workload.{key} is {value}; it must be {bound}"
        for key, valid, synonyms in (
            ("param_dtype", DTYPES, DTYPE_SYNONYMS), ("compute_dtype", DTYPES, DTYPE_SYNONYMS),
            ("kind", KINDS, KIND_SYNONYMS),
        ):  # fmt: skip
            name = getattr(self, key)
            if name not in valid:
                yield f"workload.{key} is {name!r}; {nearest(name, valid, synonyms)}"
        problem = checkpointing_problem("workload.gradient_checkpointing", self.gradient_checkpointing)
        if problem is not None:
            yield problem
        if not 0 <= self.expert_load_spread <= MAX_LOAD_SPREAD:  # also if it is no number
            yield (
                f"workload.expert_load_spread is {self.expert_load_spread:g}; it must be 0 (all experts have equally "
                f"many tokens) to {MAX_LOAD_SPREAD:g}"
            )
        yield from self.score_problems()

    def score_problems(self) -> Iterator[str]:
        """Yield an error for every value that a scoring step cannot have, and for scoring settings in other steps."""
        if self.window is not None and not self.is_scoring:
            yield f"workload.window is for workload.kind score, and the kind is {self.kind}; leave it out"
        if self.logit_blocks is not None and not self.has_logit_blocks:
            yield f"workload.logit_blocks is for workload.kind eval and score, not {self.kind}; leave it out"
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:  # also if it is no number
            yield temperature_problem("workload.temperature", self.temperature)
        if self.temperature != 1 and not self.is_scoring:
            yield f"workload.temperature is for workload.kind score, and the kind is {self.kind}; leave it out"
        if not 0 <= self.top_k <= MAX_SIZE:
            yield f"workload.top_k is {self.top_k}; it must be 0 to {MAX_SIZE}"
        is_open = self.position == AUTO_POSITION
        if self.window is not None and not is_open and not MIN_POSITION <= self.window <= self.position:
            yield (f"workload.window is {self.window}; it must be {MIN_POSITION} to workload.position, {self.position}")
        if self.logit_blocks is not None and (self.logit_blocks < 1 or self.position % self.logit_blocks):
            yield (
                f"workload.logit_blocks {self.logit_blocks} does not divide workload.position {self.position}; use a "
                "divisor of it"
            )

    def microbatch_problems(self) -> Iterator[str]:
        """Yield every conflict between the kind, the batch and the number of microbatches."""
        batch, parts = self.batch, self.num_microbatches
        if self.is_training and batch % parts:
            near = min((n for n in range(1, batch + 1) if batch % n == 0), key=lambda n: abs(n - parts))
            yield f"workload.microbatches {parts} does not divide workload.batch {batch}; use {near}"
        if not self.is_training and parts != 1:
            yield f"workload.microbatches is {parts}: only training has them; set workload.kind to train"


def temperature_problem(key: str, value: float) -> str:
    """Explain why a temperature is too low, too high or not a number; None if it is valid.

    >>> temperature_problem("task.temperature", -1.0)
    'task.temperature is -1; it must be 0.01 to 100 (ranks say what greedy decoding produces, the limit of 0)'
    """
    return (
        f"{key} is {value:g}; it must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g} (ranks say what greedy decoding "
        "produces, the limit of 0)"
    )


def raise_first(problems: Iterator[str]) -> None:
    """Raise the first problem, if there is any.

    >>> raise_first(iter([]))
    >>> raise_first(iter(["workload.batch is 0; it must be at least 1"]))
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: workload.batch is 0; it must be at least 1

    Raises:
        ConfigError: there is a problem.
    """
    problem = next(problems, None)
    if problem is not None:
        raise ConfigError(problem)
