"""The batch of most tokens per second, where `workload.batch` is auto."""

from collections.abc import Iterator
from dataclasses import replace

from shardplan.config import PlanConfig
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import AUTO_BATCH
from shardplan.search.search_configuration import search_configuration

MAX_TOKENS = 2**20
"""Most tokens of a step that are considered: beyond, larger steps are hardly faster, and results come late."""
TIE = 0.01
"""Of batches whose tokens per second differ by no more than this fraction, the smallest is taken."""


def choose_batch(config: PlanConfig, model: Model, own_attention: bool = False) -> PlanConfig:
    """Return the configuration with the batch of most tokens per second that fits, if its batch is open.

    If none fits, the batch is the smallest one. Memory grows with the batch, so that the search ends at the first batch
    that does not fit.

    Raises:
        ConfigError: the workload is training, whose batch decides what is learned.
    """
    if config.workload.batch != AUTO_BATCH:
        return config
    if config.workload.is_training:
        raise ConfigError("workload.batch auto is not for training, whose batch decides what is learned; set a number")
    rates: dict[int, float] = {}
    for batch in batches(parse_slice(config.hardware.slice).devices, config.workload.position):
        candidate = replace(config, workload=replace(config.workload, batch=batch))
        result = search_configuration(candidate, model, 1, own_attention)
        if not result.fits:
            break
        rates[batch] = candidate.workload.tokens / result.ranked[0].candidate.seconds
    best = max(rates.values(), default=0.0)
    chosen = min((batch for batch, rate in rates.items() if rate >= (1 - TIE) * best), default=1)
    return replace(config, workload=replace(config.workload, batch=chosen))


def batches(devices: int, position: int) -> Iterator[int]:
    """Yield the batches that are considered, in order: powers of two, also times the odd part of the slice."""
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    powers = [2**i for i in range(MAX_TOKENS.bit_length())]
    yield from (
        b for b in sorted({*powers, *(odd * power for power in powers)}) if b == 1 or b * position <= MAX_TOKENS
    )
