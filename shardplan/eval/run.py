"""An evaluation from start to end: plan, stream the checkpoint into the plan, evaluate, summarize."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from shardplan.checkpoint.session import prepare
from shardplan.config.command_flags import LoadingConfig
from shardplan.errors import CheckpointError, ConfigError
from shardplan.eval.batch_loop import evaluate_windows
from shardplan.eval.documents import Document, make_windows
from shardplan.eval.results import summarize
from shardplan.eval.tokenizer import load_encoder
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import load_given_plan
from shardplan.step import specialize


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
        CheckpointError: the tokenizer is another model's, or the checkpoint is damaged.
    """
    config, given = load_given_plan(config)
    if config.workload.kind != "eval":
        raise ConfigError(f"workload.kind is {config.workload.kind}; eval runs plans for evaluation, set it to eval")
    session = prepare(config, given)
    folder, plan = session.folder, session.plan
    on_plan(plan)
    model = specialize(session.model, plan)
    windows = make_windows(documents, load_encoder(folder), plan.workload.position, plan.workload.batch)
    largest = int(windows.tokens.max())
    if largest >= model.vocab.size:
        raise CheckpointError(
            f"{folder.ref}/tokenizer.json produces token {largest}, but the model has {model.vocab.size} tokens; "
            "it is another model's tokenizer"
        )
    started = time.perf_counter()
    module, _ = session.load(model.template)
    load_seconds = time.perf_counter() - started
    measured = evaluate_windows(module, model, plan, session.mesh, windows)
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
