"""Defines `evaluate`, an evaluation in a program or a notebook, and the parts that it shares with `shardplan eval`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardplan.config.command_flags import EvalCommand
from shardplan.config.load import load_command
from shardplan.config.model_config import check_model_config
from shardplan.config.sections import EvaluationKind
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.plan.workload.workload import AUTO_BATCH, AUTO_POSITION, raise_first

if TYPE_CHECKING:
    from shardplan.eval.task import EvaluationTask
    from shardplan.eval.texts.store import TextStore

COMMAND_ONLY_KEYS = ("dry_run", "json", "precision_study", "report", "verify")
"""Keys that only the command `eval` has, which `evaluate` refuses."""


def evaluate(*files: str, **sections: Any) -> dict[str, Any] | None:
    """Evaluate texts as `shardplan eval` does, in a program or a notebook, and write the results folder.

    An example is `evaluate("configs/tiny.yaml", output="results/first")`. Every process of a run calls it with the same
    arguments. An interrupted run continues where it stopped.

    Args:
        files: YAML files; later files override earlier ones.
        sections: keys that override the files, such as `data={"path": "texts.jsonl"}`.

    Returns:
        In process 0 the summary, which is also in the file summary.json: `total`, `texts` (by id) and, for extraction,
            `plots`. An empty mapping in other processes. None if the run was stopped before its end.

    Raises:
        ConfigError: the configuration cannot be used, or has a key that only the command has.
        InfeasibleError: no plan fits.
        CheckpointError: the checkpoint is damaged, or does not match its tokenizer.
        PeerError: a process of the run was lost, failed, or is stuck.
        SlowError: the run is slower than `gate` allows; the results so far are kept.
    """
    config = load_command(EvalCommand, files, sections, "evaluate")
    for key in COMMAND_ONLY_KEYS:
        if key in config.given:
            raise ConfigError(f"evaluate: {key} is a key of the command shardplan eval alone; leave it out")
    config = with_windows(config)
    store = open_inputs(config)
    # JAX and Levanter take seconds to import: what is wrong with the configuration is said before
    from shardplan.eval.run import run_evaluation

    summary = run_evaluation(config, make_task(config), store, config.output, lambda _: None, config)
    if summary and config.task.kind is EvaluationKind.EXTRACTION:
        draw_extraction(config.output, summary, store)
    return summary


def open_inputs(config: EvalCommand) -> "TextStore":
    """Check and open the inputs of an evaluation without importing JAX or Levanter.

    Raises:
        ConfigError: `check_evaluation` refuses the configuration, or the texts or the model's config.json cannot be
            read.
    """
    check_evaluation(config)
    assert config.data.path is not None
    from shardplan.eval.texts.store import open_texts

    store = open_texts(config.data.path, config.data.max_documents)
    if config.plan is None:
        check_model_config(config)
    return store


def check_evaluation(config: EvalCommand) -> None:
    """Check that a configuration names the texts, weights and output folder that an evaluation needs.

    >>> check_evaluation(load_command(EvalCommand, [], {"model": "llama-3.1-8b"}, "evaluate"))
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: data.path is not set; name a file or folder of texts to evaluate, or use --dry_run

    Raises:
        ConfigError: texts or weights are not named, or the output is not a folder.
    """
    if config.data.path is None:
        raise ConfigError("data.path is not set; name a file or folder of texts to evaluate, or use --dry_run")
    if not config.model.ref and config.plan is None:
        raise ConfigError("model.ref is not set; an evaluation needs the weights of a checkpoint, or use --dry_run")
    if config.output == "-" or config.output.endswith(".json"):
        raise ConfigError(
            f"output is {config.output!r}; it must be a folder, such as results/eval: its summary.json has the results"
        )


def with_windows(config: EvalCommand) -> EvalCommand:
    """Return the configuration with the workload for an extraction's windows; for other tasks, return it unchanged.

    By default, the batch is the fastest one, and sequences have the length that windows fill best.

    >>> sections = {"model": "llama-3.1-8b", "task": {"kind": "extraction"}, "hardware": {"slice": "v5e-8"}}
    >>> workload = with_windows(load_command(EvalCommand, [], sections, "evaluate")).workload
    >>> workload.kind, workload.window, workload.position
    ('score', 100, 512)
    """
    if config.task.kind is not EvaluationKind.EXTRACTION or config.plan is not None:
        return config
    from shardplan.plan.workload.packing import packed_length  # imports numpy

    task, work = config.task, config.workload
    length = task.window_tokens
    is_cpu = parse_slice(config.hardware.slice).is_cpu  # whose attention needs no kernel
    position = length if is_cpu else packed_length(length)
    if "workload.position" in config.given:
        position = packed_length(length) if work.position == AUTO_POSITION else work.position
    window = length if position != length else None
    batch = work.batch if "workload.batch" in config.given else AUTO_BATCH
    changed = replace(
        work,
        kind="score",
        top_k=task.top_k,
        temperature=task.temperature,
        batch=batch,
        position=position,
        window=window,
    )
    for key in ("kind", "top_k", "temperature", "window"):
        given, needed = getattr(work, key), getattr(changed, key)
        if f"workload.{key}" in config.given and given != needed:
            raise ConfigError(f"workload.{key} is {given}, task.kind extraction needs {needed}; leave it out")
    raise_first(changed.problems())
    return replace(config, workload=changed)


def make_task(config: EvalCommand) -> "EvaluationTask[Any]":
    """Return the task that a configuration selects.

    >>> sections = {"model": "llama-3.1-8b", "task": {"kind": "extraction"}}
    >>> make_task(load_command(EvalCommand, [], sections, "evaluate")).outputs
    ('log_prob', 'rank', 'top_log_prob')
    """
    from shardplan.eval.extraction.task import ExtractionTask
    from shardplan.eval.loss.task import LossTask

    if config.task.kind is EvaluationKind.EXTRACTION:
        return ExtractionTask(config.task, config.precision_study)
    return LossTask(config.task)


def draw_extraction(output: str, summary: Mapping[str, Any], store: "TextStore") -> None:
    """Draw the results of an extraction run; one process calls this."""
    from shardplan.eval.extraction.pictures import COLUMNS, INDEX, write_pictures
    from shardplan.eval.run_results.folder import read_windows
    from shardplan.runtime.progress import print_note, show_steps

    with show_steps("drawing") as report:
        left_out = write_pictures(output, read_windows(output, COLUMNS), store, summary, report)
    for line in left_out:
        print_note(line)
    print_note(f"{INDEX} in the results folder shows them")
