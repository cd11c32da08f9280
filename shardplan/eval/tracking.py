"""Metrics of a run for Levanter's trackers: its rate, its rate relative to the plan's, and its progress."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from levanter.tracker import Tracker
from levanter.tracker.json_logger import JsonLoggerTracker
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import NoopTracker
from levanter.tracker.wandb import WandbConfig

from shardplan.config.sections import TrackerKind, TrackerSection
from shardplan.errors import ConfigError, one_line
from shardplan.monitoring.step_statistics import LoopStatistics
from shardplan.plan.plan import Plan

METRICS_LOGGER = logging.getLogger("shardplan.metrics")
METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
"""File of the json tracker and folder of the tensorboard tracker, in the results folder."""


@contextmanager
def open_tracker(config: TrackerSection, output: str, plan: Plan) -> Iterator[Tracker]:
    """Start the configuration's tracker, which ends with the context; every process must call this.

    Args:
        output: the results folder.

    Raises:
        ConfigError: the tracker cannot be started.
    """
    try:
        tracker = _start(config, output)
    except Exception as error:  # of packages that are not installed, accounts, networks
        remedy = "pip install tensorboardX, or leave it out" if _lacks_tensorboard(error) else "leave it out"
        raise ConfigError(f"tracker.kind {config.kind} cannot be started: {one_line(error)}; {remedy}") from error
    tracker.log_hyperparameters({"plan": replace(plan, details=None).to_json()})
    try:
        yield tracker
    finally:
        tracker.finish()
        for handler in METRICS_LOGGER.handlers:
            handler.close()
        METRICS_LOGGER.handlers = []


def _start(config: TrackerSection, output: str) -> Tracker:
    if config.kind is TrackerKind.WANDB:  # its start is a collective of all processes
        return WandbConfig(project=config.project, name=config.name, save_code=False).init(None)
    if config.kind is None or jax.process_index() != 0:
        return NoopTracker()
    if config.kind is TrackerKind.TENSORBOARD:
        return TensorboardConfig(logdir=f"{output}/{TENSORBOARD}").init(config.name)
    if "://" in output:
        raise ConfigError(f"it writes into the results folder, which must be a local one, and is {output}")
    METRICS_LOGGER.propagate = False  # the lines are for the file alone
    METRICS_LOGGER.setLevel(logging.INFO)
    METRICS_LOGGER.handlers = [logging.FileHandler(Path(output) / METRICS)]
    return JsonLoggerTracker(METRICS_LOGGER)


def _lacks_tensorboard(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "tensorboardX"


def step_metrics(statistics: LoopStatistics, plan: Plan, done: int, total: int) -> dict[str, Any]:
    """Return the metrics for trackers after a step: rate, rate relative to the plan, and progress.

    Args:
        done: number of windows that have results, including results of earlier runs.
        total: number of windows of the run.
    """
    metrics: dict[str, Any] = {
        "eval/progress": done / total,
        "eval/windows": done,
        "eval/waiting_seconds": statistics.waiting_seconds,
    }
    step_seconds = statistics.step_seconds
    if step_seconds:
        of_plan = plan.cost.step_seconds / step_seconds
        metrics |= {
            "eval/step_seconds": step_seconds,
            "eval/tokens_per_second": statistics.tokens_per_second,
            "eval/windows_per_second": statistics.windows_per_second,
            "eval/speed_of_plan": of_plan,
            **({} if plan.mfu is None else {"eval/mfu": plan.mfu * of_plan, "eval/planned_mfu": plan.mfu}),
        }
    return metrics
