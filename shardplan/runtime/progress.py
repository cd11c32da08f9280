"""One progress bar: drawn on a terminal, a log line every few seconds elsewhere."""

import datetime
import logging
from typing import Any

from tqdm_loggable.auto import tqdm
from tqdm_loggable.tqdm_logging import tqdm_logging

from shardplan.runtime.devices import is_first_process


def progress_bar(total: int, label: str, unit: str) -> Any:
    """A bar (tqdm's interface: `update(n)`, context manager) that counts to `total` in `unit`."""
    logging.getLogger("tqdm_loggable").setLevel(logging.INFO)
    tqdm_logging.set_level(logging.INFO)
    tqdm_logging.set_log_rate(datetime.timedelta(seconds=5))
    return tqdm(
        disable=not is_first_process(),
        total=total,
        desc=label,
        unit=unit,
        unit_scale=True,
        unit_divisor=1024 if unit == "B" else 1000,
    )
