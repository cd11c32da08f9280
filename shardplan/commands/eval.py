"""`shardplan eval --config C`: plan, stream the checkpoint into the plan, evaluate text, and write the results."""

import json
import os
from collections.abc import Sequence

from shardplan.commands.inputs import check_model_config, input_paths
from shardplan.commands.output import check_outputs, output_plan, side_stream
from shardplan.commands.plan import dry_run
from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand
from shardplan.errors import ConfigError
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import write_text


def main(argv: Sequence[str]) -> None:
    """Run `shardplan eval` with the arguments `argv`."""
    config = parse_config(argv, EvalCommand)
    if config.dry_run:
        dry_run(config)
        return
    if config.data.path is None:
        raise ConfigError("data.path is not set; name a .jsonl or .txt file to evaluate, or use --dry_run")
    if not config.model.ref and config.plan is None:
        raise ConfigError("model.ref is not set; an evaluation needs the weights of a checkpoint, or use --dry_run")
    if config.output == "-":
        raise ConfigError("output is '-'; it must be a file, because tables and the Plan's JSON go to stdout")
    from shardplan.eval.documents import read_documents

    check_outputs(input_paths(config), json=config.json, output=config.output)
    documents = read_documents(config.data.path, config.data.max_documents)
    if config.plan is None:
        check_model_config(config)
    # JAX and Levanter take seconds to import: everything that can be checked without them comes first
    from shardplan.commands.verify import verify_plan
    from shardplan.eval.run import run_evaluation
    from shardplan.report.tables import console, print_results
    from shardplan.runtime.devices import is_first_process

    def on_plan(plan: Plan) -> None:
        if is_first_process():
            output_plan(plan, config.json, config.levanter_schema)
        if config.verify:  # in every process, so that all of them stop if the plan does not fit
            with open(os.devnull, "w") as nowhere:
                out = side_stream(config.json)
                verify_plan(config, plan, out if is_first_process() else nowhere)

    results = run_evaluation(config, documents, on_plan)
    if not is_first_process():
        return
    from shardplan.runtime.progress import print_note

    # printed first: a disk that is full by now must not cost the results
    print_results(results, console(side_stream(config.json)))
    write_text("output", config.output, json.dumps(results, indent=1) + "\n")
    print_note(f"results written to {config.output}")
