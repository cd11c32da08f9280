"""One check of `shardplan doctor` in this process."""

import gc

from conftest import GOLDEN

from shardplan.config import parse_config
from shardplan.config.command_flags import DoctorCommand
from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject, read_subject

LLAMA = str(GOLDEN / "llama")
CPU_8, V4_64 = "--hardware.slice=cpu-8", "--hardware.slice=v4-64"


def subject(*argv: str) -> HostSubject:
    """What arguments of the command describe."""
    return read_subject(parse_config(argv, DoctorCommand))


def findings(module, *argv: str) -> list[HostFinding]:
    """What a module of `shardplan.doctor` finds."""
    try:
        return list(module.check(subject(*argv)))
    finally:
        gc.enable()  # which some checks switch off, in processes of their own


def problem(module, *argv: str) -> HostFinding:
    """The only finding that is not ok."""
    (found,) = (finding for finding in findings(module, *argv) if finding.level is not Level.OK)
    return found
