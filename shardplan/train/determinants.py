"""The inputs and settings that determine a training's losses; a run resumes in a folder only if all are equal.

The mesh and the number of microbatches are no part: a run may go on on another slice, with another plan.
"""

import json
from collections.abc import Mapping
from typing import Any

from shardplan.config.command_flags import TrainCommand
from shardplan.monitoring.run_folder import RUN, RunFolder, digest_of
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import json_bytes
from shardplan.storage import read_bytes
from shardplan.train.levanter_file import TrainingFiles, initial_checkpoint
from shardplan.train.prepare import TrainingModel
from shardplan.train.selection import METHODS, SELECTION

PLAN_FILE, LEVANTER_FILE, SUMMARY = "plan.json", "levanter.yaml", "summary.json"
SETTINGS = ("z_loss_weight", "adapter", "initialize_from_checkpoint_path", "initialize_model_from_checkpoint_path")
TRAINER_SETTINGS = ("num_train_steps", "quantization", "model_averaging", "initialize_from")
"""Keys of the trainer section that change losses; the number of steps does so through the learning rate."""


class TrainingFolder(RunFolder):
    """The output folder of a training."""

    records = (METHODS, SELECTION)
    prepared = (PLAN_FILE, LEVANTER_FILE)

    def write(self, name: str, data: bytes) -> None:
        """Write a file; only one process calls this."""
        self._write(name, data)

    def add_records(self, records: Mapping[str, Any]) -> None:
        """Add the entries of `records` to `run.json`; only one process calls this."""
        self._write(RUN, json_bytes({**self._read_run(), **records}))

    def read_summary(self) -> dict[str, Any]:
        """Return the summary of a completed training."""
        summary: dict[str, Any] = json.loads(read_bytes(self._folder.open_for_reading(), SUMMARY) or b"{}")
        return summary

    def is_finished(self) -> bool:
        """Return whether the training has come to its end."""
        return self._folder.has_file(SUMMARY)


def training_determinants(
    config: TrainCommand, plan: Plan, training: TrainingModel, sections: Mapping[str, Any], files: TrainingFiles
) -> dict[str, Any]:
    """Return the inputs and settings that determine the losses, by name.

    Args:
        sections: the content of levanter.yaml.
    """
    work, trainer = plan.workload, sections["trainer"]
    # the folder of synthetic data's tokenizer has another path on another host
    data = {name: "synthetic" if value == files.folder else value for name, value in sections["data"].items()}
    settings = {name: sections[name] for name in SETTINGS if name in sections}
    return {
        "model": digest_of(training.digest_text.encode()),
        "weights": initial_checkpoint(config) or "random",
        "batch": work.batch,
        "position": work.position,
        "types": {"parameters": work.param_dtype, "compute": work.compute_dtype},
        "seed": trainer.get("seed", 0),
        "data_seed": sections.get("data_seed"),
        "data": data,
        "optimizer": sections.get("optimizer", {}),
        **settings,
        **{name: trainer[name] for name in TRAINER_SETTINGS if name in trainer},
    }
