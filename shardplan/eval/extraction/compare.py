"""Reads the results of several extraction runs, and takes from them what can be compared."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import ConfigError, missing_path, nearest, one_line
from shardplan.eval.extraction.pictures import model_name
from shardplan.eval.extraction.probabilities import THRESHOLDS, total_of
from shardplan.eval.results_folder import RUN, SUMMARY, differing_names
from shardplan.storage import open_folder
from shardplan.storage.folder import read_bytes

SUMMARY_PARTS = ("texts", "total", "plots", "plan")
"""The parts of summary.json that are compared."""


@dataclass(frozen=True)
class Results:
    """The results of one run."""

    ref: str
    summary: dict[str, Any]
    """Its summary.json."""
    run: dict[str, Any]
    """Its run.json: what determines the results."""


@dataclass(frozen=True)
class Comparison:
    """Several models side by side on the texts that all of them were run on."""

    labels: tuple[str, ...]
    """A name for each run, which differs from the others."""
    texts: dict[str, list[dict[str, Any]]]
    """Text -> its summary in each run."""
    total: list[dict[str, Any]]
    """The summary of these texts together in each run."""
    left_out: tuple[str, ...]
    """Ids of texts that not all runs have, or that differ between them."""
    thresholds: list[float]
    curves: list[list[float]]
    """Of each run, the covered part of all characters at each of `thresholds`."""
    has_one_tokenizer: bool
    """Whether the windows of all runs are the same parts of the texts."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "models": list(self.labels),
            "total": self.total,
            "texts": self.texts,
            "left_out": list(self.left_out),
            "thresholds": self.thresholds,
            "curves": self.curves,
            "one_tokenizer": self.has_one_tokenizer,
        }


def compare(refs: Sequence[str]) -> Comparison:
    """Read results folders, and return what can be compared.

    Raises:
        ConfigError: fewer than two folders, one that holds no finished results, another protocol, or no common text.
    """
    if len(refs) < 2:
        raise ConfigError(f"compare needs two results folders or more, and {len(refs)} is named: {', '.join(refs)}")
    paths = [ref.rstrip("/") if "://" in ref else os.path.realpath(ref) for ref in refs]
    doubled = [ref for i, ref in enumerate(refs) if paths[i] in paths[:i]]
    if doubled:
        raise ConfigError(f"{doubled[0]} is named twice; name each results folder once")
    runs = [_read(ref) for ref in refs]
    for other in runs[1:]:
        _check_protocol(runs[0], other)
    digests = [each.run["texts"] for each in runs]
    common = [id_ for id_, digest in digests[0].items() if all(each.get(id_) == digest for each in digests)]
    if not common:
        other = next((each for each in digests[1:] if each != digests[0]), digests[0])
        raise ConfigError(
            f"{', '.join(refs)} have no text in common, by id and content ({RUN}); texts differ: "
            f"{differing_names(digests[0], other)}; compare runs on the same data.path"
        )
    every = dict.fromkeys(id_ for each in digests for id_ in each)
    texts = {id_: [each.summary["texts"][id_] for each in runs] for id_ in common}
    total = [total_of([values[i] for values in texts.values()]) for i in range(len(runs))]
    thresholds, curves = _curves(runs, common, total)
    return Comparison(
        labels=_labels(runs),
        texts=texts,
        total=total,
        left_out=tuple(id_ for id_ in every if id_ not in {*common}),
        thresholds=thresholds,
        curves=curves,
        has_one_tokenizer=len({each.run["tokenizer"] for each in runs}) == 1,
    )


def _read(ref: str) -> Results:
    """Read the results in a folder."""
    if "://" not in ref and not Path(ref).is_dir():
        path = Path(ref)
        if path.is_file():
            raise ConfigError(f"{ref} is a file; name the results folder, {path.parent}")
        if not _results_near(path):
            raise ConfigError(f"{ref} {missing_path(ref, [])}; {_hint(path)}")
        raise ConfigError(f"{ref} {missing_path(ref, _results_near(path))}")
    folder = open_folder(ref)
    files = {name: read_bytes(folder, name) for name in (RUN, SUMMARY)}
    if files[RUN] is None:
        hint = f"; {_hint(Path(ref))}" if "://" not in ref else ""
        raise ConfigError(f"{ref} holds no results of an extraction, whose {RUN} is missing{hint}")
    if files[SUMMARY] is None:
        raise ConfigError(f"{ref} holds an extraction that has not ended, without {SUMMARY}; run its command again")
    values = {}
    for name, data in files.items():
        needed = SUMMARY_PARTS if name == SUMMARY else ("texts", "protocol", "tokenizer")
        try:
            values[name] = json.loads(data or b"")
            missing = [part for part in needed if part not in values[name]]
            if name == SUMMARY and not missing and "thresholds" not in values[name]["plots"]:
                missing = ["thresholds"]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{ref}/{name} cannot be read: {one_line(error)}; run the evaluation again") from error
        if missing:
            raise ConfigError(f"{ref}/{name} is not that of an extraction, without {missing[0]!r}; name another folder")
    return Results(ref, values[SUMMARY], values[RUN])


def _hint(path: Path) -> str:
    """Return a hint to the results folders in or beside a path: that with the most similar name, or all."""
    near = _results_near(path)
    if not near:
        return f"name the output of `shardplan eval --task.kind extraction`, a folder with {SUMMARY}"
    return nearest(str(path), near)


def _results_near(path: Path) -> list[str]:
    """Return the results folders in or beside a path."""
    return [str(each.parent) for each in {*path.parent.glob(f"*/{SUMMARY}"), *path.glob(f"*/{SUMMARY}")}]


def _check_protocol(first: Results, other: Results) -> None:
    """Check that two runs have windows of the same protocol."""
    expected, actual = first.run["protocol"], other.run["protocol"]
    names = [name for name in expected if actual.get(name) != expected[name]]
    if names:
        differences = ", ".join(f"{name} {actual.get(name)} instead of {expected[name]}" for name in names)
        raise ConfigError(
            f"{other.ref} has windows of another protocol than {first.ref}: {differences}; compare runs of one protocol"
        )


def _labels(runs: Sequence[Results]) -> tuple[str, ...]:
    """Return the names of the models if they differ, else those of the folders, else their references."""
    models = tuple(model_name(each.summary) for each in runs)
    folders = tuple(each.ref.rstrip("/").rpartition("/")[2] for each in runs)
    return next((names for names in (models, folders) if len({*names}) == len(runs)), tuple(each.ref for each in runs))


def _curves(
    runs: Sequence[Results], common: Sequence[str], total: Sequence[Mapping[str, Any]]
) -> tuple[list[float], list[list[float]]]:
    """Return thresholds, and the coverage of the common texts at these for each run.

    Runs with many texts have curves of the first ones only; the coverage at `THRESHOLDS` is known of all.
    """
    thresholds: list[float] = runs[0].summary["plots"]["thresholds"]
    curves = []
    for each in runs:
        plots, texts = each.summary["plots"], each.summary["texts"]
        if len(common) == len(texts):
            curves.append(plots["total"]["curve"])
            continue
        covered, characters = np.zeros(len(thresholds)), 0
        for id_ in common:
            if texts[id_]["windows"] and id_ not in plots["texts"]:
                return list(THRESHOLDS), [list(one["coverage"].values()) for one in total]
            curve = plots["texts"][id_]["curve"] if texts[id_]["windows"] else 0.0
            covered += np.array(curve) * texts[id_]["characters"]
            characters += texts[id_]["characters"]
        curves.append((covered / max(characters, 1)).tolist())
    return thresholds, curves
