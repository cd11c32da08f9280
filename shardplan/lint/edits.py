"""Changes of the keys of a hand-written Levanter configuration, and which ones could mend it."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.config import MESH_AXES, leaves
from shardplan.errors import closest
from shardplan.hardware import divisors
from shardplan.levanter_config.trainer_section import DEFAULT_FSDP_AXIS
from shardplan.lint.findings import Subject

ROOT = "trainer."
BATCH_KEY, PARTS_KEY = "trainer.train_batch_size", "trainer.per_device_parallelism"
SECTIONS_WITH_DEFAULT = ("trainer.mesh.param_mapping",)
"""Mappings that mean something else without an entry than left out."""


@dataclass(frozen=True)
class Edit:
    """One change: a key gets another value, is added, removed, or renamed."""

    values: Mapping[str, Any]
    """Dotted key -> its new value."""
    removed: tuple[str, ...] = ()
    """Dotted keys."""
    axes: frozenset[str] = frozenset()
    """Logical axes whose mapping it changes; all mesh axes where it changes the size of one."""

    def apply(self, trainer: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the `trainer` section after the change."""
        changed = copy.deepcopy(dict(trainer))
        for key in self.removed:
            section, name = _parent(changed, key)
            del section[name]
        for key, value in self.values.items():
            section, name = _parent(changed, key)
            section[name] = value
        return changed


def _parent(trainer: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *sections, name = key.removeprefix(ROOT).split(".")
    for section in sections:
        trainer = trainer.setdefault(section, {})
    return trainer, name


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys that differ, as the lines of a unified diff: `-trainer.fsdp_axis: mlp`, `+trainer.fsdp_axis: embed`."""
    old, new = leaves(before, ROOT), leaves(after, ROOT)
    lines = []
    for key in dict.fromkeys((*old, *new)):
        if key in old and (key not in new or new[key] != old[key]):
            lines.append(f"-{key}: {_text(old[key])}")
        if key in new and (key not in old or new[key] != old[key]):
            lines.append(f"+{key}: {_text(new[key])}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return "null" if value is None else str(value)


def candidate_edits(trainer: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    """Every single change that is tried: sizes of mesh and batch, entries of mappings, entries that are not there."""
    written = leaves(trainer, ROOT)
    yield from _sizes(written, s)
    yield from _batches(written, s)
    yield from _entries(written, s)
    yield from _additions(written, s)
    if s.is_flat:
        yield from _fsdp(written, s)


def _sizes(written: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    parts = divisors(s.hardware.devices // s.hardware.slices)
    others: dict[str, Sequence[int]] = {
        "trainer.replica_ici_axis_size": parts,
        "trainer.replica_dcn_axis_size": (-1,),
        "trainer.mesh.axes.replica": parts,
        "trainer.mesh.axes.data": (-1, *parts),
        "trainer.mesh.dcn_axes.replica_dcn": (-1,),
    }
    keys = {s.size_key("model"): parts}
    for key, sizes in (keys | {key: sizes for key, sizes in others.items() if key in written}).items():
        for size in sizes:
            if size != written.get(key, 1):
                yield Edit({key: size}, axes=frozenset(MESH_AXES))


def _batches(written: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    """Batches that divide, near one in the file that does not; of training, what a device takes at once."""
    size, layout = s.workload.batch, s.layout
    groups = math.lcm(layout.batch_shards, s.devices(s.compute.get(layout.batch_axis, ())))
    axes = frozenset({layout.batch_axis})
    if size % groups and written.get(BATCH_KEY) == size:
        for near in (size // groups * groups, (size // groups + 1) * groups):
            if 0 < near <= 2 * size:
                yield Edit({BATCH_KEY: near}, axes=axes)
    if s.workload.kind != "train" or written.get(BATCH_KEY) == -1:
        return
    each = size // layout.batch_shards
    fewer = divisors(each)[:-1] if size % layout.batch_shards == 0 else ()
    now = written.get(PARTS_KEY, -1)
    for number in (-1, *fewer):  # all at once is -1
        if number != now:
            yield Edit({PARTS_KEY: number}, axes=axes)


def _entries(written: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    """Changes of what there is; an entry that is there by default is overridden."""
    batch_key = "trainer.batch_axis" if s.is_flat else "trainer.mesh.batch_axis_name"
    if batch_key in written:
        yield Edit({}, (batch_key,), frozenset(s.batch_axes))
    entries = {entry.key: entry for entry in (*s.layout.compute_entries, *s.layout.param_entries)}
    for name in written.get("trainer.tensor_parallel_axes") or ():
        left = [axis for axis in written["trainer.tensor_parallel_axes"] if axis != name]
        yield Edit({"trainer.tensor_parallel_axes": left}, axes=frozenset({name}))
    for key, entry in entries.items():
        section, _, axis = key.rpartition(".")
        if axis != entry.axis or section == ROOT.rstrip("."):
            continue  # not one of a mapping
        in_section = [other for other in written if other.startswith(f"{section}.")]
        if key in written and (len(in_section) > 1 or section not in SECTIONS_WITH_DEFAULT):
            yield Edit({}, (key,), frozenset({axis}))
        elif entry.mesh_axes:
            yield Edit({key: None}, axes=frozenset({axis}))
        for mesh_axis, size in s.layout.mesh.items():
            if size > 1 and entry.mesh_axes != [mesh_axis] and axis in s.mappable and not _cuts_residual(key, s):
                yield Edit({key: mesh_axis}, axes=frozenset({axis}))
        meant = closest(axis, s.mappable) if axis not in s.known else None
        if meant and key in written and f"{section}.{meant}" not in written:
            yield Edit({f"{section}.{meant}": written[key]}, (key,), frozenset({axis, meant}))


def _additions(written: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    """Entries for axes that products of matrices have; those that layers are stacked along, and experts, stay whole."""
    for section, mesh_axis in zip(s.mapping_keys, ("model", "data"), strict=True):
        for axis in s.computed:
            key = f"{section}.{axis}"
            if s.layout.mesh[mesh_axis] > 1 and key not in written and not _cuts_residual(key, s):
                yield Edit({key: mesh_axis}, axes=frozenset({axis}))


def _fsdp(written: Mapping[str, Any], s: Subject) -> Iterator[Edit]:
    key = "trainer.fsdp_axis"
    now = written.get(key, DEFAULT_FSDP_AXIS)
    old = frozenset([now] if isinstance(now, str) else now or ())
    for axis in (None, *s.computed):
        axes = old | ({axis} if axis else frozenset())
        if axis == DEFAULT_FSDP_AXIS and key in written and axis != now:
            yield Edit({}, (key,), axes)
        elif axis != now:
            yield Edit({key: axis}, axes=axes)


def _cuts_residual(key: str, s: Subject) -> bool:
    """Whether the entry would cut the residual stream by its own axis while computing, as no plan does."""
    section, _, axis = key.rpartition(".")
    return axis == s.axes.residual and section != s.mapping_keys[1]
