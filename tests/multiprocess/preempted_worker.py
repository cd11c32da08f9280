"""An evaluation by a program that leaves SIGTERM to JAX: `python preempted_worker.py ARGUMENTS`."""

import sys

import jax

from shardplan.config import parse_config
from shardplan.config.command_flags import EvalCommand
from shardplan.eval.evaluate import make_task
from shardplan.eval.run import run_evaluation
from shardplan.eval.texts.store import open_texts

if __name__ == "__main__":
    config = parse_config(sys.argv[1:], EvalCommand)
    store = open_texts(config.data.path, None)
    summary = run_evaluation(config, make_task(config), store, config.output, lambda plan: None, config)
    print(f"process {jax.process_index()}: {'stopped' if summary is None else 'done'}")
