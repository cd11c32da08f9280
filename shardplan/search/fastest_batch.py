"""Chooses the batch with the most tokens per second, if `workload.batch` is auto.

In training the batch decides what is learned as well, so that it is chosen between a floor and a ceiling of tokens per
step, `step_tokens`. Microbatches and gradient checkpointing are searched anew for every batch, if they are open.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.registry import Model
from shardplan.plan.workload.token_counts import TokenRange, parse_token_range
from shardplan.plan.workload.workload import AUTO_BATCH
from shardplan.search.search_configuration import search_configuration

MAX_TOKENS = 2**20
"""Default for the most tokens of a step to consider: larger steps are hardly faster, and results come late."""
ANY_TOKENS = TokenRange(0, MAX_TOKENS)
TIE = 0.01
"""Relative difference of tokens per second up to which batches tie; the smallest of tied batches is chosen."""


def choose_batch(config: PlanConfig, model: Model, own_attention: bool = False) -> PlanConfig:
    """Replace `workload.batch: auto` by the fastest batch that fits; a number is left as it is.

    The fastest batch has the most tokens per second; among batches within `TIE` of it, the smallest is chosen. If no
    batch fits, the result is the smallest batch that was tried. In evaluation the search ends at the first batch that
    does not fit, since memory grows with the batch. In training all batches are tried: a larger one may fit where a
    smaller one does not, because it divides over more devices.

    Raises:
        ConfigError: the workload is training and `step_tokens` is not set, or no batch is in its range.
    """
    if config.workload.batch != AUTO_BATCH:
        return config
    tokens = _token_range(config)
    # a configuration with a number for its batch refuses `step_tokens`
    closed = replace(config, workload=replace(config.workload, batch=1), step_tokens=None)
    hardware, position = parse_slice(config.hardware.slice), config.workload.position
    tried = list(batches(hardware.devices, position, tokens))
    if not tried:
        raise ConfigError(_empty_range_text(config.step_tokens, position, tokens, hardware.devices))
    rates: dict[int, float] = {}
    for batch in tried:
        candidate = replace(closed, workload=replace(config.workload, batch=batch))
        result = search_configuration(candidate, model, 1, own_attention)
        if result.fits:
            rates[batch] = candidate.workload.tokens / result.ranked[0].candidate.seconds
        elif not config.workload.is_training:
            break
    best = max(rates.values(), default=0.0)
    chosen = min((batch for batch, rate in rates.items() if rate >= (1 - TIE) * best), default=tried[0])
    return replace(closed, workload=replace(config.workload, batch=chosen))


def _token_range(config: PlanConfig) -> TokenRange:
    """Return the fewest and the most tokens of a step."""
    if config.step_tokens is not None:
        return parse_token_range("step_tokens", config.step_tokens)
    if config.workload.is_training:
        raise ConfigError(
            "workload.batch auto needs step_tokens in training, where the batch decides what is learned: the fewest "
            "and the most tokens of a step, such as 4M-16M; or set a number"
        )
    return ANY_TOKENS


def _empty_range_text(text: str | None, position: int, tokens: TokenRange, devices: int) -> str:
    """Return the message for a range that contains no possible batch, with the nearest ones."""
    near = list(batches(devices, position, TokenRange(1, max(2 * tokens.most, position))))
    fewer = [batch for batch in near if batch * position < tokens.least]
    more = [batch for batch in near if batch * position > tokens.most]
    nearest = [f"{batch} ({batch * position:,} tokens)" for batch in (*fewer[-1:], *more[:1])]
    return (
        f"step_tokens is {text}, and no batch that is tried is in between: nearest, in sequences of {position} tokens: "
        f"{' and '.join(nearest)}; widen the range, or set workload.batch to a number"
    )


def batches(devices: int, position: int, tokens: TokenRange = ANY_TOKENS) -> Iterator[int]:
    """Yield the batches to try, ascending: powers of two, and their products with the odd part of `devices`.

    If `tokens` has a lower bound, three times these are tried as well, so that every range from n to 2 n has a batch.
    Without a lower bound, a batch of one sequence is tried even if it exceeds the upper bound.

    >>> from itertools import islice
    >>> list(islice(batches(devices=24, position=4096), 8))
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    powers = [2**i for i in range(int(tokens.most).bit_length())]
    factors = {1, odd} if tokens.least == 0 else {1, 3, odd, 3 * odd}
    for batch in sorted({factor * power for factor in factors for power in powers}):
        is_allowed = tokens.least <= batch * position <= tokens.most
        if is_allowed or (batch == 1 and tokens.least == 0):
            yield batch
