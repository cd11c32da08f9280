"""Edits of a hand-written trainer section: how each changes it, and which edits a repair tries."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import closest
from shardplan.hardware import divisors
from shardplan.hardware.mesh_axes import MESH_AXES, TENSOR_AXES
from shardplan.lint.checks.batch import BATCH_KEY, PER_DEVICE_KEY, nearest_multiples, stage_divisor
from shardplan.lint.subject import Subject
from shardplan.plan.serialization import flatten

TRAINER_PREFIX = "trainer."
SECTIONS_WITH_DEFAULT = ("trainer.mesh.param_mapping",)
"""Mappings that have a default if the file omits them, so that an empty mapping has another meaning."""


@dataclass(frozen=True)
class Edit:
    """One change of a trainer section: a key gets another value, is added, removed, or renamed."""

    values: Mapping[str, Any]
    """Dotted key -> the key's new value."""
    removed: tuple[str, ...] = ()
    """Dotted keys that are removed."""
    axes: frozenset[str] = frozenset()
    """Logical axes whose mapping changes; all mesh axes if the size of one changes."""

    def apply(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a changed copy of the content of the `trainer` section."""
        changed = copy.deepcopy(dict(trainer))
        for key in self.removed:
            section, name = _parent(changed, key)
            del section[name]
        for key, value in self.values.items():
            section, name = _parent(changed, key)
            section[name] = value
        return changed


def _parent(trainer: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *sections, name = key.removeprefix(TRAINER_PREFIX).split(".")
    for section in sections:
        trainer = trainer.setdefault(section, {})
    return trainer, name


def diff_trainers(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """List the keys that differ as lines of a unified diff: `-trainer.seed: 1`, `+trainer.seed: 2`."""
    old, new = flatten(before, TRAINER_PREFIX), flatten(after, TRAINER_PREFIX)
    lines = []
    for key in dict.fromkeys((*old, *new)):
        if key in old and (key not in new or new[key] != old[key]):
            lines.append(f"-{key}: {value_text(old[key])}")
        if key in new and (key not in old or new[key] != old[key]):
            lines.append(f"+{key}: {value_text(new[key])}")
    return lines


NO_ENTRY = "no entry"
"""Mapping value that stands for a logical axis without an entry."""
MAPPINGS = ("compute_mapping", "param_mapping", "shared_mapping")
"""Sections that map logical axes; an axis without an entry is replicated, or sharded by another section's entry."""
DEFAULTS = {
    "mesh.axes.data": "-1", "mesh.axes.model": "1", "mesh.axes.replica": "1", "mesh.batch_axis_name": "batch",
    "mesh.dcn_axes.replica_dcn": "-1", "mesh.param_mapping.embed": "data", "mesh.shared_mapping.heads": "model",
    "mesh.shared_mapping.mlp": "model", "per_device_parallelism": "-1", "train_batch_size": "512",
}  # fmt: skip
"""Key of the trainer section -> Levanter's value if the file omits it."""


def explain_lines(lines: Sequence[str]) -> list[str]:
    """Add Levanter's default to diff lines of keys that are only added or only removed.

    >>> explain_lines(["+trainer.per_device_parallelism: 2"])
    ["+trainer.per_device_parallelism: 2 (instead of Levanter's default, -1)"]
    """
    keys = {sign: {line[1:].split(": ")[0] for line in lines if line[0] == sign} for sign in "-+"}
    explained = []
    for line in lines:
        key = line[1:].split(": ")[0]
        default = _default(key)
        is_removed = line[0] == "-"
        if default is None or key in keys["+" if is_removed else "-"] or (is_removed and default == NO_ENTRY):
            explained.append(line)
        elif not is_removed:
            explained.append(f"{line} (instead of {default})")
        else:
            explained.append(f"{line} (then it is {default})")
    return explained


def _default(key: str) -> str | None:
    """Describe the behaviour if the file does not have a key; None if it is not known."""
    name = key.rpartition(TRAINER_PREFIX)[2] if TRAINER_PREFIX in key else None
    if name in DEFAULTS:
        return f"Levanter's default, {DEFAULTS[name]}"
    is_mapping = name is not None and name.rpartition(".")[0].rpartition(".")[2] in MAPPINGS
    return NO_ENTRY if is_mapping else None


def value_text(value: Any) -> str:
    """Write a value of the file as YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def candidate_edits(trainer: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield every single edit that a repair tries: sizes of mesh and batch, and entries to change, remove or add."""
    written = flatten(trainer, TRAINER_PREFIX)
    yield from _corrections(written, subject)
    yield from _batch_edits(written, subject)  # early, because they repair most, should a limit of time stop the search
    yield from _mesh_size_edits(written, subject)
    yield from _entry_edits(written, subject)
    yield from _new_entries(written, subject)


def _corrections(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield the edits that `shardplan.lint.corrections` assumed for values that Levanter rejects."""
    for key, value in flatten(subject.trainer, TRAINER_PREFIX).items():
        if key not in written or written[key] != value:
            yield Edit({key: value}, axes=frozenset({key.rpartition(".")[2], *MESH_AXES}))


def _mesh_size_edits(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield other sizes of mesh axes that shard tensors, or whose size is in the file."""
    parts = divisors(subject.hardware.devices // subject.hardware.slices)
    others: dict[str, Sequence[int]] = {subject.size_key(axis): parts for axis in MESH_AXES if axis not in TENSOR_AXES}
    others[subject.size_key("data")] = (-1, *parts)
    others["trainer.mesh.dcn_axes.replica_dcn"] = (-1,)
    keys = {subject.size_key(axis): parts for axis in TENSOR_AXES}
    for key, sizes in (keys | {key: sizes for key, sizes in others.items() if key in written}).items():
        for size in sizes:
            if size != written.get(key, 1):
                yield Edit({key: size}, axes=frozenset(MESH_AXES))


def _batch_edits(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield divisible batch sizes near an indivisible size in the file, and, for training, other microbatch sizes."""
    if subject.section.stages:
        yield from _schedule_edits(written, subject)
        return
    size, section = subject.section.batch or subject.workload.batch, subject.section
    shards = math.lcm(section.batch_shards, subject.devices(subject.compute.get(section.batch_axis, ())))
    axes = frozenset({section.batch_axis})
    # only a batch that the file has: adding one "repairs" nearly everything, by more sequences a step (docs/log.md)
    if size % shards and written.get(BATCH_KEY) == size:
        for near in (size // shards * shards, (size // shards + 1) * shards):
            if 0 < near <= 2 * size:
                yield Edit({BATCH_KEY: near}, axes=axes)
    if not subject.workload.is_training or written.get(BATCH_KEY) == -1:
        return
    per_device = size // section.batch_shards
    smaller = divisors(per_device)[:-1] if size % section.batch_shards == 0 else ()
    current = written.get(PER_DEVICE_KEY, -1)
    for number in (-1, *smaller):  # -1 is the whole batch at once
        if number != current:
            yield Edit({PER_DEVICE_KEY: number}, axes=axes)


def _schedule_edits(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield batch schedules with the same starts and with divisible sizes, and other microbatch sizes."""
    section, divisor = subject.section, stage_divisor(subject)
    axes = frozenset({section.batch_axis})
    if any(stage.size % divisor for stage in section.stages):
        for which in (0, -1):  # the multiple below, and the one above
            steps = []
            for step, stage in zip(written[BATCH_KEY], section.stages, strict=True):
                is_kept = stage.size % divisor == 0
                steps.append({**step, "value": stage.size if is_kept else nearest_multiples(stage, divisor)[which]})
            yield Edit({BATCH_KEY: steps}, axes=axes)
    common = math.gcd(*(stage.size for stage in section.stages))
    numbers = divisors(common // section.batch_shards) if common % section.batch_shards == 0 else ()
    current = written.get(PER_DEVICE_KEY, -1)
    for number in (-1, *numbers):
        if number != current:
            yield Edit({PER_DEVICE_KEY: number}, axes=axes)


def _entry_edits(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield changes of existing entries; entries that exist by default are overridden."""
    batch_key = "trainer.mesh.batch_axis_name"
    if batch_key in written:
        yield Edit({}, (batch_key,), frozenset(subject.batch_axes))
    entries = {entry.key: entry for entry in (*subject.section.compute_entries, *subject.section.param_entries)}
    for key, entry in entries.items():
        section, _, axis = key.rpartition(".")
        if axis != entry.axis or section == TRAINER_PREFIX.rstrip("."):
            continue  # not an entry of a mapping
        siblings = [other for other in written if other.startswith(f"{section}.")]
        if key in written and (len(siblings) > 1 or section not in SECTIONS_WITH_DEFAULT):
            yield Edit({}, (key,), frozenset({axis}))
        elif entry.mesh_axes:
            yield Edit({key: None}, axes=frozenset({axis}))
        for mesh_axis, size in subject.section.mesh.items():
            if (
                size > 1
                and entry.mesh_axes != [mesh_axis]
                and axis in subject.mappable
                and not _shards_residual(key, subject)
            ):
                yield Edit({key: mesh_axis}, axes=frozenset({axis}))
        meant = closest(axis, subject.mappable) if axis not in subject.known else None
        if meant and key in written and f"{section}.{meant}" not in written:
            yield Edit({f"{section}.{meant}": written[key]}, (key,), frozenset({axis, meant}))


def _new_entries(written: Mapping[str, Any], subject: Subject) -> Iterator[Edit]:
    """Yield new entries for the axes of matrix-product weights, except the axes of stacked layers and experts."""
    shared, stored = subject.mapping_keys
    entries = [*((shared, axis) for axis in TENSOR_AXES), (stored, "data")]
    for section, mesh_axis in entries:
        for axis in subject.weight_axes:
            key = f"{section}.{axis}"
            if subject.section.mesh[mesh_axis] > 1 and key not in written and not _shards_residual(key, subject):
                yield Edit({key: mesh_axis}, axes=frozenset({axis}))


def _shards_residual(key: str, subject: Subject) -> bool:
    """Return whether the entry would shard the residual axis in computations, which no plan does."""
    # the cost model has no price for it: repairs would promise steps that no device can compute (docs/log.md)
    section, _, axis = key.rpartition(".")
    return axis == subject.axes.residual and section != subject.mapping_keys[1]
