"""python tests/multiprocess/lm_eval_worker.py CHECKPOINT SETTINGS: one process of a run of lm_eval's tasks."""

import json
import sys

from compare_lm_eval import evaluate, model_args

import shardplan.eval.harness  # noqa: F401 - registers the model
from shardplan.runtime.exit_codes import run


def main(argv: list[str]) -> None:
    """Print the results as JSON; nothing in processes other than 0."""
    checkpoint, settings = argv
    print(json.dumps(evaluate("shardplan", model_args("llama", checkpoint), **json.loads(settings)), default=float))


raise SystemExit(run("worker", main, sys.argv[1:]))
