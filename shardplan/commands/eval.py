"""`python -m shardplan.eval --config C`: plan, stream the checkpoint into the plan, evaluate text, write results."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardplan.commands.output import check_targets, show
from shardplan.commands.plan import main as dry_run
from shardplan.commands.run import run
from shardplan.config import Config
from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_writable


def main(config: Config) -> None:
    """Run the evaluation that the configuration describes, or only plan it."""
    if config.dry_run:
        dry_run(config)
        return
    if config.data.path is None:
        raise ConfigError("data.path is not set; name a .jsonl or .txt file to evaluate, or use --dry_run")
    if not config.model.ref and config.plan is None:
        raise ConfigError("model.ref is not set; an evaluation needs the weights of a checkpoint, or use --dry_run")
    from shardplan.eval.documents import read_documents

    check_targets(config)
    check_writable("output", config.output)
    documents = read_documents(config.data.path, config.data.max_documents)
    # JAX and Levanter take seconds to import: only now, when nothing but they can complain.
    from shardplan.commands.verify import verify_plan
    from shardplan.eval.run import run_evaluation
    from shardplan.report.tables import console, print_results
    from shardplan.runtime.devices import is_first_process

    def on_plan(plan: Plan) -> None:
        if is_first_process():
            show(plan, config.json)
        if config.verify:  # every process for itself, so that all of them stop where it does not fit
            with open(os.devnull, "w") as nowhere:
                out = sys.stderr if config.json == "-" else sys.stdout
                verify_plan(config, plan, out if is_first_process() else nowhere)

    results = run_evaluation(config, documents, on_plan)
    if not is_first_process():
        return
    Path(config.output).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    # with `--json -` stdout is the Plan's
    print_results(results, console(sys.stderr if config.json == "-" else sys.stdout))
    print(f"results written to {config.output}", file=sys.stderr)


def run_command(argv: Sequence[str]) -> int:
    """`shardplan eval ARGV`; returns the exit code."""
    return run(main, "shardplan eval", argv)
