"""The findings of a check of this host."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    """The host meets the requirement."""
    WARNING = "warning"
    """A run can start, but may be slow or fail later."""
    ERROR = "error"
    """A run on this host will fail."""


class Check(StrEnum):
    """A subject of a check; `shardplan.doctor.run` names the module that checks it."""

    VERSIONS = "versions"
    IMPORTS = "imports"
    DEVICES = "devices"
    MEMORY = "memory"
    DISK = "disk"
    OUTPUT = "output"
    ENVIRONMENT = "environment"
    COORDINATOR = "coordinator"
    CHECKPOINT = "checkpoint"
    TEXTS = "texts"
    PLAN = "plan"


@dataclass(frozen=True)
class HostFinding:
    """One result of a check."""

    level: Level
    measured: str
    """Result of the check, on one line; an error message of `shardplan.errors` has its remedy at the end."""
    required: str = ""
    """Requirement of a run; empty if `measured` says it."""
    remedy: str = ""
    """Action that removes a warning or an error; empty if `measured` names the action."""


HostFindings = dict[Check, list[HostFinding]]
"""The findings of each check that was made."""


def worst_level(findings: HostFindings) -> Level:
    """Return the worst level of all findings."""
    levels = {finding.level for each in findings.values() for finding in each}
    return next((level for level in (Level.ERROR, Level.WARNING) if level in levels), Level.OK)
