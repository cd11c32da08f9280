"""Runs a training from start to end: plan, Levanter's file, Levanter's `train_lm` with both, watched.

A run goes on where an earlier one with the same output folder ended, on the same slice or on another one. On the same
mesh its losses are equal to the bit to those of a run without a break; on another mesh they differ as floating-point
sums in another order do.
"""

import contextlib
import copy
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import draccus
import levanter.trainer
import levanter.utils.logging
import yaml
from levanter.distributed import DistributedConfig
from levanter.main import train_lm

from shardplan.config.command_flags import TrainCommand
from shardplan.config.given_plan import load_given_plan
from shardplan.config.levanter_keys import TEXT_KEYS
from shardplan.errors import ConfigError, SlowError
from shardplan.levanter_patch import patch_levanter
from shardplan.model.gradient_checkpointing.activation_names import context_named_by_kernel
from shardplan.monitoring.run_monitor import open_monitor
from shardplan.plan.attention_plan import KernelName
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import json_bytes
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import ProcessGroup, open_process_group
from shardplan.runtime.progress import print_note
from shardplan.storage.writing import OutputFolder
from shardplan.train.determinants import (
    LEVANTER_FILE,
    PLAN_FILE,
    SUMMARY,
    TrainingFolder,
    training_determinants,
)
from shardplan.train.levanter_file import (
    METRICS_LOGGER,
    TrainingFiles,
    check_sections,
    initial_checkpoint,
    is_synthetic,
    levanter_sections,
    nested_sections,
)
from shardplan.train.prepare import (
    TRAIN_LM,
    TrainingModel,
    build_training_model,
    check_training_plan,
    make_training_plan,
    prepare_training,
    unplanned_notes,
    with_planned_optimizer,
)
from shardplan.train.readable_checkpoints import explain_unreadable
from shardplan.train.reference_folder import reference_path, write_reference
from shardplan.train.selection import METHODS, SELECTION, describe_selection
from shardplan.train.trainer import planned_trainer
from shardplan.train.watch import TrainingWatch

METRICS = "metrics.jsonl"
"""Name of the metrics file in the output folder."""
LOG = "levanter.log"
"""Name of Levanter's own log in the output folder."""


@dataclass(frozen=True)
class PreparedTraining:
    """The plan, the files and the settings with which a training is started."""

    config: TrainCommand
    training: TrainingModel
    plan: Plan
    files: TrainingFiles
    sections: dict[str, Any]
    """Content of levanter.yaml."""

    @property
    def steps(self) -> int:
        """Number of steps of the complete training."""
        default = train_lm.TrainLmConfig().trainer.num_train_steps
        return int(self.sections["trainer"].get("num_train_steps", default))


def prepare_files(config: TrainCommand, training: TrainingModel, plan: Plan) -> PreparedTraining:
    """Make the files that are written to the output folder before a training starts.

    Raises:
        ConfigError: Levanter refuses a key or a value.
    """
    output = OutputFolder(config.output).ref
    folder = reference_path(output)
    # the same at every start of a run, and another one for another folder of the same name
    name = config.levanter.get("trainer.id") or f"{Path(output).name}-{hashlib.sha256(output.encode()).hexdigest()[:6]}"
    files = TrainingFiles(output, folder, initial_checkpoint(config) or folder, str(name))
    sections = levanter_sections(config, plan, training.model, files)
    check_sections(sections, TRAIN_LM, train_lm.TrainLmConfig)
    return PreparedTraining(config, training, plan, files, sections)


def write_files(prepared: PreparedTraining) -> None:
    """Write the plan and Levanter's file to the output folder."""
    folder = TrainingFolder(prepared.config.output)
    folder.write(PLAN_FILE, json_bytes(prepared.plan.to_json()))
    text = yaml.safe_dump(prepared.sections, sort_keys=False, default_flow_style=None, width=100)
    folder.write(LEVANTER_FILE, text.encode())
    write_reference_folder(prepared)


def write_reference_folder(prepared: PreparedTraining) -> None:
    """Write the folder with config.json and tokenizer, if Levanter's file names it."""
    config, files = prepared.config, prepared.files
    has_own_data = not is_synthetic(config)
    if files.reference != files.folder and has_own_data:
        return
    tokenizer = prepared.sections["data"]["tokenizer"] if has_own_data else None
    training = prepared.training
    write_reference(files.folder, training.hf_config, training.model.vocab.size, tokenizer)


def check_training(config: TrainCommand) -> TrainCommand:
    """Check Levanter's keys before planning, and return the configuration with the optimizer to plan for.

    Raises:
        ConfigError: Levanter refuses a key or a value, or two keys contradict each other.
    """
    if not config.workload.is_training:
        raise ConfigError(f"workload.kind is {config.workload.kind}, and this command trains; leave it out")
    texts = [name for name in TEXT_KEYS if config.levanter.get(name) is not None]
    if texts:
        raise ConfigError(f"{texts[0]} names texts to evaluate; to train on texts, set Levanter's data.components")
    initial_checkpoint(config)  # raises where weights are asked for, and no checkpoint is named
    check_sections(nested_sections(config.levanter), TRAIN_LM, train_lm.TrainLmConfig)
    return with_planned_optimizer(config)


def plan_training(config: TrainCommand) -> PreparedTraining:
    """Plan a training, or take the Plan file of `config.plan`; needs no accelerator and no weights."""
    config, given = load_given_plan(check_training(config))
    training = build_training_model(config)
    plan = given or make_training_plan(config, training.model)
    check_training_plan(plan, training.model)
    return prepare_files(config, training, plan)


def run_training(
    config: TrainCommand, on_plan: Callable[[Plan], None], stops: threading.Event | None = None
) -> dict[str, Any] | None:
    """Plan (or take the Plan file of `config.plan`), and train with Levanter until the last step.

    Args:
        on_plan: called with the Plan before anything is loaded.
        stops: once this is set in any process, the run saves a checkpoint after the step under way, and stops.

    Returns:
        The summary, which is also in the output folder; None if the run was stopped before its end.

    Raises:
        ConfigError: the plan is not for this training, Levanter refuses a key, the folder is of another run, an array
            is not as planned, or processes have different configurations.
        CheckpointError: the checkpoint is damaged.
        PeerError: a process of the run was lost, failed, or is stuck.
        SlowError: the run is slower than `config.gate` allows; the same command resumes it from its last step.
    """
    stops = stops or threading.Event()
    config, given = load_given_plan(check_training(config))
    training, plan = prepare_training(config, given, config.deadline.loading)
    patch_levanter(plan)
    prepared = prepare_files(config, training, plan)
    folder = TrainingFolder(config.output)
    with open_process_group() as processes:
        with processes.phase("showing the plan", config.deadline.compiling):  # which may compile its program
            processes.agree("shown", lambda: on_plan(plan), lambda _: {})
        _claim(prepared, folder, processes)
        if processes.broadcast("finished", folder.is_finished):
            if is_first_process():
                print_note(f"all {prepared.steps} steps are done already: nothing is computed")
            return folder.read_summary()
        if is_first_process():
            _print_notes(prepared)
        with open_monitor(config, prepared.files.output, plan, processes) as monitor:
            watch = TrainingWatch(plan, config.deadline, processes, monitor, prepared.steps, stops)
            _run_levanter(prepared, watch, processes)
            processes.wait_for_all("trained")
            if is_first_process():
                monitor.record_time(watch.statistics, is_completed=not watch.is_stopped)
                folder.add_records(_selection_records(prepared.config, watch))
        if monitor.too_slow is not None:
            error = SlowError(f"stopped: {monitor.too_slow}; the same command goes on from here")
            error.is_shared = True  # the training has stopped in all processes
            raise error
        if watch.is_stopped:
            return None
        return _finish(prepared, folder, watch, processes)


def _claim(prepared: PreparedTraining, folder: TrainingFolder, processes: ProcessGroup) -> None:
    """Claim the output folder for this run, and write the files that it starts with."""
    config, plan, training, files = prepared.config, prepared.plan, prepared.training, prepared.files
    determinants = training_determinants(config, plan, training, prepared.sections, files)

    def write() -> None:
        folder.claim(determinants)
        write_files(prepared)

    with processes.phase("preparing", config.deadline.loading):
        processes.broadcast("claim", write)
        processes.agree("shared output", folder.check_shared, lambda _: {})
        # with a remote output each host has this folder on its own disk
        if "://" in files.output and not is_first_process():
            write_reference_folder(prepared)


def _print_notes(prepared: PreparedTraining) -> None:
    config = prepared.config
    weights = initial_checkpoint(config)
    notes = [f"weights of {weights}" if weights else "random weights"]
    if is_synthetic(config):
        notes.append("synthetic data, because there is no section data")
    print_note(f"training {prepared.steps} steps from {' on '.join(notes)}")
    for note in unplanned_notes(config):
        print_note(note)


def _run_levanter(prepared: PreparedTraining, watch: TrainingWatch, processes: ProcessGroup) -> None:
    """Run `levanter.main.train_lm` with the plan, until it ends or is stopped."""
    # draccus removes keys from what it decodes, and the sections are read again below
    levanter_config = draccus.decode(train_lm.TrainLmConfig, copy.deepcopy(prepared.sections))
    # the processes are connected already
    levanter_config.trainer.distributed = DistributedConfig(initialize_jax_distributed=False)
    tokens, vocab = len(levanter_config.data.the_tokenizer), prepared.training.model.vocab.size
    if tokens > vocab:
        raise ConfigError(
            f"data.tokenizer {levanter_config.data.tokenizer} has {tokens} tokens, and the model {vocab}; name the "
            "tokenizer of the model, or set vocab_size in its config.json"
        )
    uses_splash = prepared.plan.attention.kernel == KernelName.SPLASH
    saving = levanter_config.trainer.checkpointer
    own_checkpoints = tuple(str(path) for path in (saving.base_path, saving.temporary_base_path) if path is not None)
    with (
        processes.phase("preparing the data", prepared.config.deadline.loading),
        _log_to_files(prepared),
        context_named_by_kernel() if uses_splash else contextlib.nullcontext(),
        planned_trainer(watch, prepared.plan.compiler_options, vocab),
        explain_unreadable(own_checkpoints),
    ):
        train_lm.main(levanter_config)


def _selection_records(config: TrainCommand, watch: TrainingWatch) -> dict[str, Any]:
    """Return the records of Native Sparse Attention for run.json and summary.json; empty for other models."""
    records: dict[str, Any] = {METHODS: watch.selected_methods} if watch.selected_methods else {}
    if config.selection_statistics and watch.metrics:
        records[SELECTION] = describe_selection(watch.metrics, watch.last_step)
    return records


@contextlib.contextmanager
def _log_to_files(prepared: PreparedTraining) -> Iterator[None]:
    """Write metrics and Levanter's log to files of a local output folder within the context.

    Levanter's own setup of logging, which writes everything to stderr, is disabled meanwhile.
    """
    output, handlers = prepared.files.output, []
    if "://" not in output:
        is_json = METRICS_LOGGER in str(prepared.sections["trainer"]["tracker"])
        parts = [*([(METRICS_LOGGER, METRICS)] if is_json else []), ("levanter", LOG)] if is_first_process() else []
        for name, file in parts:
            handler = logging.FileHandler(Path(output) / file)
            handler.setLevel(logging.INFO)
            handlers.append((logging.getLogger(name), handler))
    metrics = logging.getLogger(METRICS_LOGGER)
    metrics.setLevel(logging.INFO)
    metrics.propagate = False  # the lines are for the file alone
    for logger, handler in handlers:
        logger.addHandler(handler)
    try:
        with mock.patch.object(levanter.utils.logging, "init_logging", lambda *_, **__: None):
            yield
    finally:
        for logger, handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def _finish(
    prepared: PreparedTraining, folder: TrainingFolder, watch: TrainingWatch, processes: ProcessGroup
) -> dict[str, Any]:
    """Write the summary of the training, and return it."""
    summary = {
        "steps": prepared.steps,
        "loss": watch.last_loss,
        "checkpoints": prepared.sections["trainer"]["checkpointer"]["base_path"],
        "exported": prepared.sections.get("hf_save_path"),
        "run": {
            "steps": watch.statistics.steps,
            "seconds_per_step": watch.statistics.step_seconds,
            "tokens_per_second": watch.statistics.tokens_per_second,
        },
        **_selection_records(prepared.config, watch),
        "plan": prepared.plan.to_json(),
        "versions": prepared.plan.versions,
    }
    processes.broadcast("summary", lambda: folder.write(SUMMARY, json_bytes(summary)))
    return summary
