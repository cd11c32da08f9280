"""The loop over batches of the evaluation step."""

import time
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardplan.eval.loss.documents import Windows
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.runtime.process_progress import shared_progress
from shardplan.step import loss_program


@dataclass(frozen=True)
class EvalRun:
    """The losses and the speed of an evaluation."""

    losses: np.ndarray
    """float32[window, position]: negative log-likelihood in nats of the token after each; 0 where none is predicted."""
    seconds: float
    """Duration of all steps but the first."""
    first_step_seconds: float
    """Duration of the first step, compilation included."""
    tokens_timed: int
    """Tokens predicted in `seconds`."""


def evaluate_windows(module: Any, model: Model, plan: Plan, mesh: Mesh, windows: Windows) -> EvalRun:
    """Compute the losses of every window, batch by batch, on the plan's mesh.

    Args:
        module: the Levanter model with its arrays, sharded by the plan's parameter mapping.
        windows: a multiple of the plan's batch.
    """
    batch = plan.workload.batch
    count = len(windows.tokens) // batch
    losses, seconds, first, timed = [], 0.0, 0.0, 0
    program = loss_program(model, plan, mesh)
    with shared_progress(count, "evaluating", "steps") as progress:
        started = time.perf_counter()
        step = program.compile(plan.compiler_options)
        for index in range(count):
            rows = slice(index * batch, (index + 1) * batch)
            tokens = _place(windows.tokens[rows], program.arguments[1])
            predicted = _place(windows.predicted[rows], program.arguments[2])
            loss = step(module, tokens, predicted)
            losses.append(_to_host(loss.rearrange(tokens.axes).array))
            now = time.perf_counter()
            if index == 0:
                first = now - started
            else:
                seconds, timed = seconds + now - started, timed + int(windows.predicted[rows].sum())
            started = now
            progress.update(1)
    return EvalRun(np.concatenate(losses), seconds, first, timed)


def _place(values: np.ndarray, like: NamedArray) -> NamedArray:
    """Put `values` on the devices, with the axes and the sharding of `like`."""
    array = jax.make_array_from_callback(values.shape, like.array.sharding, lambda index: values[index])
    return hax.named(array, like.axes)


def _to_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
