"""The main job: plan, stream the checkpoint into the plan, evaluate, summarise."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from shardplan.checkpoint.session import prepare
from shardplan.config import Config
from shardplan.errors import CheckpointError, ConfigError
from shardplan.eval.documents import Document, make_windows
from shardplan.eval.evaluate import evaluate
from shardplan.eval.results import summarize
from shardplan.eval.tokenizer import load_encoder
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import with_plan
from shardplan.step import specialize


def run_evaluation(config: Config, documents: Sequence[Document], on_plan: Callable[[Plan], None]) -> dict[str, Any]:
    """Evaluate `documents` as the configuration says.

    Args:
        on_plan: called with the Plan before anything is loaded.

    Returns:
        The results JSON: `total`, `documents` (a row each), `load`, `plan` (the Plan's JSON), `versions`.
    """
    config, given = with_plan(config)
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
            f"{folder.ref}/tokenizer.json makes token {largest}, the model has {model.vocab.size} tokens; "
            "it is another model's tokenizer"
        )
    started = time.perf_counter()
    module, _ = session.load(model.template)
    load_seconds = time.perf_counter() - started
    measured = evaluate(module, model, plan, session.mesh, windows)
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
