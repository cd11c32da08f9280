"""Replaces values that Levanter rejects by probably intended ones, each with a finding, so that checks can go on."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ConfigError, closest, nearest
from shardplan.hardware import Slice
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.levanter_config.flat_schema import FLAT_KEYS, convert_sections, old_keys
from shardplan.levanter_config.mesh_section import MESH_KEYS
from shardplan.levanter_config.model_section import ATTENTION_BACKENDS
from shardplan.levanter_config.section import CorrectableError, MappingError, SectionReader
from shardplan.levanter_config.trainer_section import TRAINER_KEYS, TrainerSection, parse_trainer_section
from shardplan.lint.edits import Edit
from shardplan.lint.findings import Finding, FindingKind, Severity

RENAME_CUTOFF = 0.75
"""Least similarity (`difflib.SequenceMatcher.ratio`) at which an unknown name counts as misspelt."""
MAX_CORRECTIONS_PER_KEY = 2
"""Maximum number of corrections of a key; the size of `data` may need two, the second one for the other axes."""


def parse_nearest(
    trainer: Mapping[str, Any], hardware: Slice
) -> tuple[TrainerSection, list[Finding], Mapping[str, Any]]:
    """Parse a `trainer` section after correcting unknown keys, unknown mesh axes and wrong sizes of mesh axes.

    Returns:
        The parsed section, a finding per correction, and the corrected content.

    Raises:
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    trainer, findings = correct_keys(trainer, hardware)
    section, trainer, more = _read_nearest(
        trainer, lambda values: parse_trainer_section(values, hardware.devices, hardware.slices)
    )
    return section, findings + more, trainer


def convert_nearest(sections: Mapping[str, Any], hardware: Slice) -> tuple[dict[str, Any], list[str], list[Finding]]:
    """Convert sections of levanter 1.2 after correcting `trainer` keys that neither version has.

    Returns:
        The sections as Levanter has them today, the dotted keys that it does not have any more, and a finding per
        correction. Sections without such keys are returned as they are.

    Raises:
        ConfigError: a value of the wrong type.
    """
    trainer: Any = sections["trainer"]
    findings: list[Finding] = []
    if isinstance(trainer, Mapping):
        trainer, findings = correct_keys(trainer, hardware, FLAT_KEYS)
    old = old_keys({**sections, "trainer": trainer})
    if not old:
        return dict(sections), [], []
    if not any(key.startswith("trainer.") for key in old):
        return convert_sections(sections, hardware), old, []
    converted, _, more = _read_nearest(
        trainer, lambda values: convert_sections({**sections, "trainer": values}, hardware)
    )
    return converted, old, findings + more


def _read_nearest[Read](
    trainer: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Read]
) -> tuple[Read, Mapping[str, Any], list[Finding]]:
    """Read the content of a `trainer` section, with each wrong value replaced by the nearest valid one.

    Returns:
        What `read` returns, the corrected content, and a finding per value.
    """
    findings: list[Finding] = []
    while True:
        try:
            return read(trainer), trainer, findings
        except CorrectableError as error:
            if sum(finding.where == (error.key,) for finding in findings) >= MAX_CORRECTIONS_PER_KEY:
                raise
            trainer = Edit({error.key: error.nearest}).apply(trainer)
            findings.append(_value_finding(error))


def correct_keys(
    trainer: Mapping[str, Any], hardware: Slice, also_valid: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Finding]]:
    """Replace every key that Levanter does not have by the key that was probably intended, or remove it.

    Args:
        also_valid: keys of the trainer section that are taken besides Levanter's.

    Returns:
        The corrected content of the `trainer` section, and a finding per key.

    Raises:
        ConfigError: `trainer` is not a section.
    """
    corrected = copy.deepcopy(SectionReader("trainer", trainer).values)
    findings = []
    for section in _sections(corrected, also_valid):
        for key in [key for key in section.values if key not in section.valid]:
            meant = closest(str(key), section.valid, RENAME_CUTOFF)
            if meant in section.values or not _is_readable(section.path, meant, section.values[key], hardware):
                meant = None
            if meant is None and section.is_mesh:
                continue  # the parser raises: a mesh with other axes is unusual, but not a mistake
            value = section.values.pop(key)
            if meant is not None:
                section.values[meant] = value
            findings.append(_key_finding(section, key, meant))
    return corrected, findings


def correct_attention_backend(name: str | None) -> tuple[str | None, list[Finding]]:
    """Replace an unknown attention backend by the probably intended one, or by Levanter's default.

    Returns:
        The backend, None for Levanter's default, and a finding if it was replaced.
    """
    if name is None or name.lower() in ATTENTION_BACKENDS:
        return name, []
    meant = closest(name.lower(), ATTENTION_BACKENDS, RENAME_CUTOFF)
    finding = Finding(
        Severity.ERROR,
        FindingKind.ATTENTION_BACKEND,
        ("model.attn_backend",),
        f"Levanter has no attention backend {name!r} and does not start; the other findings assume "
        + (meant or "its default"),
        nearest(name, ATTENTION_BACKENDS),
    )
    return meant, [finding]


@dataclass(frozen=True)
class _Section:
    """A section of the configuration, and the keys that Levanter accepts in it."""

    path: tuple[str, ...]
    """Names of the sections from below `trainer` down to this one."""
    values: dict[Any, Any]
    valid: tuple[str, ...]
    is_mesh: bool = False
    """Whether the section's keys are mesh axes, which may have any name."""

    @property
    def name(self) -> str:
        return ".".join(("trainer", *self.path))


def _sections(trainer: dict[Any, Any], also_valid: Sequence[str]) -> Iterator[_Section]:
    """Yield the sections with a fixed set of keys, one by one: a section is corrected before the next is read."""
    yield _Section((), trainer, (*TRAINER_KEYS, *also_valid))
    mesh = trainer.get("mesh")
    if isinstance(mesh, dict):
        yield _Section(("mesh",), mesh, MESH_KEYS)
        if isinstance(mesh.get("axes"), dict):
            yield _Section(("mesh", "axes"), mesh["axes"], MESH_AXES, is_mesh=True)


def _is_readable(path: tuple[str, ...], key: str | None, value: Any, hardware: Slice) -> bool:
    """Return whether `value` has a type that `key`, in the section at `path`, accepts."""
    if key is None:
        return False
    content: dict[str, Any] = {key: value}
    for name in reversed(path):
        content = {name: content}
    try:
        converted, _, _ = convert_nearest({"trainer": content}, hardware)
        parse_nearest(converted["trainer"], hardware)
    except ConfigError:
        return False
    return True


def _key_finding(section: _Section, key: Any, meant: str | None) -> Finding:
    if section.is_mesh:
        kind, problem = FindingKind.UNKNOWN_MESH_AXIS, f"a plan's mesh has no axis {key!r}"
    else:
        kind, problem = FindingKind.UNKNOWN_KEY, f"Levanter has no key {key!r} in {section.name} and does not start"
    similar = closest(str(key), section.valid)
    remove = f"remove it, or did you mean {similar!r}?" if similar else "remove it"
    return Finding(
        Severity.ERROR,
        kind,
        (f"{section.name}.{key}",),
        f"{problem}; the other findings {f'assume {meant!r}' if meant else 'ignore it'}",
        f"did you mean {meant!r}?" if meant else remove,
    )


def _value_finding(error: CorrectableError) -> Finding:
    kind, axes, assumed = FindingKind.MESH_SIZE, frozenset(MESH_AXES), str(error.nearest)
    if isinstance(error, MappingError):
        names = [error.nearest] if isinstance(error.nearest, str) else error.nearest or []
        kind, axes = FindingKind.UNKNOWN_MESH_AXIS if error.unknown else FindingKind.LIST, frozenset({error.axis})
        assumed = " and ".join(names) or f"that {error.axis} is replicated"
    return Finding(Severity.ERROR, kind, (error.key,), str(error), f"the other findings assume {assumed}", axes=axes)
