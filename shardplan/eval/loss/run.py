"""An evaluation from start to end: plan, stream the checkpoint into the plan, evaluate, summarize."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from shardplan.checkpoint.session import prepare
from shardplan.config.command_flags import LoadingConfig
from shardplan.config.given_plan import load_given_plan
from shardplan.errors import ConfigError
from shardplan.eval.loss.batch_loop import evaluate_windows
from shardplan.eval.loss.documents import Document, Windows, make_windows
from shardplan.eval.loss.results import summarize
from shardplan.eval.texts.tokenizer import check_tokens, load_encoder
from shardplan.plan.mapping import mesh_size
from shardplan.plan.plan import Plan
from shardplan.plan.workload import BATCH_AXIS
from shardplan.runtime.devices import is_first_process
from shardplan.step import specialize

logger = logging.getLogger(__name__)


def run_evaluation(
    config: LoadingConfig, documents: Sequence[Document], on_plan: Callable[[Plan], None]
) -> dict[str, Any]:
    """Plan (or take the Plan file of `config.plan`), load the checkpoint, and evaluate `documents`.

    Args:
        on_plan: called with the Plan before anything is loaded.

    Returns:
        The results JSON: `total`, `documents` (a row each), `load`, `plan` (the Plan's JSON), `versions`.

    Raises:
        ConfigError: the workload is not an evaluation.
        CheckpointError: tokenizer, config.json and weights have different vocabularies, or the checkpoint is damaged.
    """
    config, given = load_given_plan(config)
    if config.workload.kind != "eval":
        raise ConfigError(f"workload.kind is {config.workload.kind}; eval runs plans for evaluation, set it to eval")
    session = prepare(config, given)
    folder, plan = session.folder, session.plan
    on_plan(plan)
    model = specialize(session.model, plan)
    windows = make_windows(documents, load_encoder(folder), plan.workload.position, plan.workload.batch)
    check_tokens(int(windows.tokens.max()), model, folder)
    if is_first_process():
        _warn_of_padding(windows, plan)
    started = time.perf_counter()
    module, _ = session.load(model.template)
    load_seconds = time.perf_counter() - started
    measured = evaluate_windows(module, model, plan, session.mesh, windows)
    if is_first_process() and not np.isfinite(measured.losses).all():
        logger.warning("the loss is not finite: the weights, or activations in compute_dtype, hold NaN or infinity")
    summary = summarize(documents, windows, measured.losses)
    return {
        "total": {
            **summary["total"],
            "tokens_per_second": measured.tokens_timed / measured.seconds if measured.seconds else None,
            "first_step_seconds": measured.first_step_seconds,
        },
        "documents": summary["documents"],
        "load": {
            "ref": folder.ref,
            "seconds": load_seconds,
            "bytes": sum(array.nbytes for array in jax.tree.leaves(eqx.filter(module, eqx.is_array))),
        },
        "plan": plan.to_json(),
        "versions": plan.versions,
    }


def _warn_of_padding(windows: Windows, plan: Plan) -> None:
    """Log that the text does not fill one batch, and the smallest batch that it fits in."""
    batch, shards = plan.workload.batch, mesh_size(plan.mesh, plan.compute_mapping.get(BATCH_AXIS, ()))
    # in the plan's own sharding if that is smaller, else in a new plan
    needed = -(-windows.count // shards) * shards
    if windows.count < batch:
        logger.warning(
            "the text fills %d of %d rows of %d tokens of a batch: the others are padding; workload.batch %d is enough",
            windows.count, batch, plan.workload.position,
            needed if needed < batch else windows.count,
        )  # fmt: skip
