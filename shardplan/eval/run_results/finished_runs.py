"""Reads the results folders of finished runs, to compare them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.config.sections import EvaluationKind
from shardplan.errors import ConfigError, nearest, one_line
from shardplan.eval.run_results.folder import SUMMARY
from shardplan.monitoring.run_folder import RUN
from shardplan.storage import open_folder, read_bytes

RUN_PARTS = {EvaluationKind.EXTRACTION: ("texts", "protocol", "tokenizer"), EvaluationKind.LOSS: ("texts", "tokenizer")}
SUMMARY_PARTS = {
    EvaluationKind.EXTRACTION: ("texts", "total", "plots", "plan"),
    EvaluationKind.LOSS: ("texts", "total", "plan"),
}
"""Task -> parts of run.json and summary.json that are compared."""
NAMES = {EvaluationKind.EXTRACTION: "an extraction", EvaluationKind.LOSS: "a loss"}
"""Task -> noun with article for one of its runs, in messages."""


def model_name(summary: Mapping[str, Any]) -> str:
    """Return the last part of a run's model reference, and the last part of its adapter's reference.

    >>> plan = {"model": {"ref": "org/llama", "config": None, "adapter": "org/llama-lora"}}
    >>> model_name({"plan": plan})
    'llama + llama-lora'
    """
    model = summary["plan"]["model"]
    refs = [model["ref"] or model["config"], model.get("adapter")]
    return " + ".join(str(ref).rstrip("/").rpartition("/")[2] for ref in refs if ref)


@dataclass(frozen=True)
class FinishedRun:
    """The results of one run."""

    ref: str
    kind: EvaluationKind
    summary: dict[str, Any]
    """Content of the run's summary.json."""
    run: dict[str, Any]
    """Content of the run's run.json, which determines the results."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return model_name(self.summary)


@dataclass(frozen=True)
class MatchedTexts:
    """The ids of texts that several runs have in common, in the order of the runs."""

    common: tuple[str, ...]
    differing: tuple[str, ...]
    """Ids of texts that all runs have with different contents."""
    missing: tuple[str, ...]
    """Ids of texts that only some runs have."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Ids of texts that cannot be compared."""
        return self.differing + self.missing


def read_runs(refs: Sequence[str]) -> list[FinishedRun]:
    """Read results folders, which must be of one task.

    Raises:
        ConfigError: there are fewer than two folders, a folder is named twice or holds no finished results, or the runs
            are of several tasks.
    """
    if len(refs) < 2:
        raise ConfigError(f"compare needs two results folders or more, and {len(refs)} is named: {', '.join(refs)}")
    # one folder may be named by two paths
    paths = [ref.rstrip("/") if "://" in ref else os.path.realpath(ref) for ref in refs]
    doubled = [ref for i, ref in enumerate(refs) if paths[i] in paths[:i]]
    if doubled:
        raise ConfigError(f"{doubled[0]} is named twice; name each results folder once")
    runs = [_read(ref) for ref in refs]
    for other in runs[1:]:
        if other.kind is not runs[0].kind:
            raise ConfigError(
                f"{runs[0].ref} is {NAMES[runs[0].kind]} and {other.ref} {NAMES[other.kind]}; compare runs of one task"
            )
    return runs


def match_texts(runs: Sequence[FinishedRun]) -> MatchedTexts:
    """Match the texts of runs by id and content.

    >>> texts = {"first": {"a": "1f", "b": "2e"}, "second": {"a": "1f", "b": "3d", "c": "4c"}}
    >>> match_texts([FinishedRun(ref, EvaluationKind.LOSS, {}, {"texts": each}) for ref, each in texts.items()])
    MatchedTexts(common=('a',), differing=('b',), missing=('c',))

    Raises:
        ConfigError: the runs have no text in common.
    """
    digests = [each.run["texts"] for each in runs]
    common: list[str] = []
    differing: list[str] = []
    missing: list[str] = []
    for id_ in dict.fromkeys(id_ for each in digests for id_ in each):
        found = {each.get(id_) for each in digests}
        group = missing if None in found else common if len(found) == 1 else differing
        group.append(id_)
    if not common:
        differ = f"texts differ: {', '.join(differing)}; " if differing else ""
        raise ConfigError(
            f"{differ}{', '.join(each.ref for each in runs)} have no text in common, by id and content ({RUN}, texts); "
            "compare runs on the same data.path"
        )
    return MatchedTexts(tuple(common), tuple(differing), tuple(missing))


def other_tokenizers(runs: Sequence[FinishedRun], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of the runs whose tokenizer differs from the first run's.

    >>> digests = {"a": "1f", "b": "1f", "c": "2e"}
    >>> runs = [FinishedRun(ref, EvaluationKind.LOSS, {}, {"tokenizer": digest}) for ref, digest in digests.items()]
    >>> other_tokenizers(runs, labels=("a", "b", "c"))
    ('c',)
    """
    first = runs[0].run["tokenizer"]
    return tuple(label for run, label in zip(runs, labels, strict=True) if run.run["tokenizer"] != first)


def labels_of(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """Return distinct labels for runs: names of models if they differ, else names of folders, else full references.

    >>> summary = {"plan": {"model": {"ref": "org/llama", "config": None}}}
    >>> labels_of([FinishedRun(ref, EvaluationKind.LOSS, summary, {}) for ref in ("runs/first", "runs/second")])
    ('first', 'second')
    """
    models = tuple(each.model for each in runs)
    folders = tuple(each.ref.rstrip("/").rpartition("/")[2] for each in runs)
    return next((names for names in (models, folders) if len({*names}) == len(runs)), tuple(each.ref for each in runs))


def check_protocol(first: FinishedRun, other: FinishedRun, expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Check that two runs have the same window protocol.

    >>> first, other = (FinishedRun(ref, EvaluationKind.LOSS, {}, {}) for ref in ("a", "b"))
    >>> check_protocol(first, other, {"stride": 5}, {"stride": 9})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: b has windows of another protocol than a: stride 9 instead of 5; ...

    Args:
        expected, actual: the settings of the first run and of the other run; a missing setting has its default.

    Raises:
        ConfigError: the protocols differ.
    """
    names = [name for name in {**expected, **actual} if actual.get(name) != expected.get(name)]
    if names:
        differences = ", ".join(f"{name} {actual.get(name)} instead of {expected.get(name)}" for name in names)
        raise ConfigError(
            f"{other.ref} has windows of another protocol than {first.ref}: {differences}; compare runs of one protocol"
        )


def _read(ref: str) -> FinishedRun:
    """Read the results in a folder."""
    if "://" not in ref and not Path(ref).is_dir():
        path = Path(ref)
        if path.is_file():
            raise ConfigError(f"{ref} is a file; name a results folder, the --output of a run")
        raise ConfigError(f"{ref} does not exist; {_hint(path)}")
    folder = open_folder(ref)
    data = read_bytes(folder, RUN)
    if data is None:
        hint = f"; {_hint(Path(ref))}" if "://" not in ref else ""
        raise ConfigError(f"{ref} holds no results of an evaluation, whose {RUN} is missing{hint}")
    run = _parse(ref, RUN, data)
    task = run.get("task", EvaluationKind.EXTRACTION.value)  # the first versions had no other task, and named none
    if task not in list(EvaluationKind):
        raise ConfigError(f"{ref}/{RUN} is of the task {task!r}, and compared are {' and '.join(EvaluationKind)}")
    kind = EvaluationKind(task)
    data = read_bytes(folder, SUMMARY)
    if data is None:
        raise ConfigError(f"{ref} holds {NAMES[kind]} that has not ended, without {SUMMARY}; run its command again")
    summary = _parse(ref, SUMMARY, data)
    for name, values, needed in ((RUN, run, RUN_PARTS[kind]), (SUMMARY, summary, SUMMARY_PARTS[kind])):
        missing = [part for part in needed if part not in values]
        if (
            name == SUMMARY
            and kind is EvaluationKind.EXTRACTION
            and not missing
            and "thresholds" not in values["plots"]
        ):
            missing = ["thresholds"]
        if missing:
            raise ConfigError(f"{ref}/{name} is not that of {NAMES[kind]}, without {missing[0]!r}; name another folder")
    return FinishedRun(ref, kind, summary, run)


def _parse(ref: str, name: str, data: bytes) -> dict[str, Any]:
    """Return the content of a JSON file of a results folder."""
    try:
        values = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{ref}/{name} cannot be read: {one_line(error)}; run the evaluation again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{ref}/{name} cannot be read: it is no object; run the evaluation again")
    return values


def _hint(path: Path) -> str:
    """Suggest the results folder with the most similar name, in or beside a path; or else list all of them."""
    near = {*path.parent.glob(f"*/{SUMMARY}"), *path.glob(f"*/{SUMMARY}")}
    if not near:
        return f"name the output of `shardplan eval`, a folder with {SUMMARY}"
    return nearest(str(path), [str(each.parent) for each in near])
