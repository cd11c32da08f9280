"""The choices that a workload leaves to the search: gradient checkpointing, and numbers such as microbatches.

Every combination of these values is a configuration with a space of its own. Those that differ only in numbers are
searched one after the other: a larger number saves memory and costs time, so that multiples of a number that is too
slow with unlimited memory are left out.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.config import PlanConfig
from shardplan.hardware import Slice, divisors, parse_slice
from shardplan.plan.workload.checkpointing import DEFAULT, OPEN_CHECKPOINTING
from shardplan.plan.workload.kinds import LogitBlocks
from shardplan.plan.workload.workload import Workload

OPEN_CHECKPOINTING_KINDS = (DEFAULT, "nested")
"""Kinds of gradient checkpointing tried for `auto`: `default`, with every option for activations.

`recompute` is the same without a choice, and `save_all` keeps elementwise results as well, which takes longer to write
and to read than to compute."""
AUTO_CHECKPOINTING = (DEFAULT, "nested", "recompute", "save_all")
"""Kinds tried for `auto` if the options for activations are not known."""
HOST_CHECKPOINTING = ("offload_carries",)
"""Additional kinds tried on TPUs beside `AUTO_CHECKPOINTING`; they move activations to host memory."""


class OpenNumber(NamedTuple):
    """A number of parts of a step, such as microbatches, that the workload may leave open."""

    key: str
    """The field of `Workload`; its value is None if the number is open."""
    values: Callable[[Workload, Slice, int], Sequence[int | None]]
    """Function of workload, slice and vocabulary size -> numbers to try, ascending.

    The only value is None for a workload that has no such parts."""


def _microbatches(workload: Workload, hardware: Slice, vocab: int) -> Sequence[int]:
    return divisors(workload.batch) if workload.is_training else (1,)


def _logit_blocks(workload: Workload, hardware: Slice, vocab: int) -> Sequence[int | None]:
    """Return the least number of blocks that bounds a device's logits; more blocks only read the head's weights again.

    An evaluation may also compute all logits at once, which takes more memory but needs no loop.
    """
    blocks = workload.with_logit_blocks(vocab, hardware.devices).logit_blocks
    if workload.kind_row.logit_blocks is LogitBlocks.POSSIBLE:
        return (None,) if blocks == 1 else (None, blocks)
    return (blocks,)


OPEN_NUMBERS = (OpenNumber("microbatches", _microbatches), OpenNumber("logit_blocks", _logit_blocks))
"""The numbers that a workload may leave open, one row each."""


class WorkloadVariant(NamedTuple):
    """A configuration whose workload has no open choices left."""

    config: PlanConfig
    numbers: tuple[int, ...]
    """Values of `OPEN_NUMBERS`; 1 if the workload has no such parts."""
    keeps_open: bool
    """Whether the search chooses which activations are kept, offloaded or recomputed, beyond the given policy."""

    def is_multiple_of(self, numbers: tuple[int, ...]) -> bool:
        """Return whether each number of this variant is a multiple of its counterpart in `numbers`."""
        return all(own % other == 0 for own, other in zip(self.numbers, numbers, strict=True))


def enumerate_variants(config: PlanConfig, vocab: int, has_options: bool) -> Iterator[list[WorkloadVariant]]:
    """Yield the variants for each kind of gradient checkpointing to try, with numbers in ascending order.

    >>> from shardplan.config.sections import ModelConfig
    >>> config = PlanConfig(ModelConfig(config="gpt2-large"), workload=Workload("train", batch=4))
    >>> [[each.config.workload.microbatches for each in kind] for kind in enumerate_variants(config, 32000, False)]
    [[1, 2, 4]]

    Args:
        vocab: the number of tokens in the vocabulary.
        has_options: whether the options of activations (keep, offload, recompute) are known.
    """
    work, hardware = config.workload, parse_slice(config.hardware.slice)
    tried: list[Sequence[int | None]] = []
    for number in OPEN_NUMBERS:
        given = getattr(work, number.key)
        tried.append(number.values(work, hardware, vocab) if given is None else (given,))
    is_open = work.gradient_checkpointing == OPEN_CHECKPOINTING and work.is_training and has_options
    for kind in _checkpointing_kinds(work, hardware, has_options):
        variants = []
        for values in itertools.product(*tried):
            named = {number.key: value for number, value in zip(OPEN_NUMBERS, values, strict=True)}
            workload = replace(work, gradient_checkpointing=kind, **named)  # type: ignore[arg-type]
            numbers = tuple(value or 1 for value in values)
            keeps_open = is_open and kind == DEFAULT
            variants.append(WorkloadVariant(replace(config, workload=workload), numbers, keeps_open))
        yield variants


def _checkpointing_kinds(workload: Workload, hardware: Slice, has_options: bool) -> tuple[str, ...]:
    if workload.gradient_checkpointing != OPEN_CHECKPOINTING:
        return (workload.gradient_checkpointing,)
    if not workload.is_training:
        return (DEFAULT,)
    if has_options:
        return OPEN_CHECKPOINTING_KINDS
    return AUTO_CHECKPOINTING if hardware.is_cpu else AUTO_CHECKPOINTING + HOST_CHECKPOINTING
