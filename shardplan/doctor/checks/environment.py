"""Finds environment variables that contradict each other, the slice, or the plan's compiler options."""

import os
from collections.abc import Iterator, Mapping

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.hardware import host_count
from shardplan.runtime.environment import (
    ADDRESS,
    PLATFORMS,
    PROCESS_COUNT,
    PROCESS_ID,
    read_process_variables,
)
from shardplan.search.result.compiler_options import planned_options

XLA_FLAGS, LIBTPU_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
LIBTPU_PREFIXES = ("xla_tpu_", "xla_jf_")
"""Prefixes of options that only libtpu knows; JAX ends the process if XLA_FLAGS has an option that it does not know."""


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Check the environment variables for processes and platforms, and the compiler's flags."""
    problems = [*_process_problems(subject), *_platform_problems(subject), *_flag_problems(subject)]
    yield from problems or [HostFinding(Level.OK, _summary())]


def _process_problems(subject: HostSubject) -> Iterator[HostFinding]:
    variables = read_process_variables()
    if variables.address is None and os.environ.get(PROCESS_ID, "0") != "0":
        yield HostFinding(
            Level.WARNING,
            f"{PROCESS_ID} is {os.environ[PROCESS_ID]}, and {ADDRESS} is not set: this process would run alone",
            remedy=f"set {ADDRESS} and {PROCESS_COUNT} as well, or none of the three",
        )
    hardware = subject.tpu_slice
    if variables.address is None or hardware is None:
        return
    hosts = host_count(hardware)
    if variables.count != hosts:
        yield HostFinding(
            Level.WARNING,
            f"{PROCESS_COUNT} is {variables.count}",
            f"{hosts}, one for each host of {hardware.name}",
            f"start one process on each host, with {PROCESS_COUNT}={hosts}",
        )


def _platform_problems(subject: HostSubject) -> Iterator[HostFinding]:
    platforms = os.environ.get(PLATFORMS, "")
    hardware = subject.tpu_slice
    if hardware is not None and platforms and "tpu" not in platforms.split(","):
        yield HostFinding(
            Level.ERROR,
            f"{PLATFORMS} is {platforms!r}: JAX does not use the TPU",
            f"tpu, for {hardware.name}",
            f"unset {PLATFORMS}",
        )


def _flag_problems(subject: HostSubject) -> Iterator[HostFinding]:
    own, libtpu = (flags_of(os.environ.get(name, "")) for name in (XLA_FLAGS, LIBTPU_FLAGS))
    misplaced = [name for name in own if name.startswith(LIBTPU_PREFIXES)]
    if misplaced:
        yield HostFinding(
            Level.ERROR,
            f"{XLA_FLAGS} has {', '.join(misplaced)}, which only libtpu knows: JAX ends the process",
            remedy=f"set it in {LIBTPU_FLAGS}",
        )
    for name, planned in _compiler_options(subject).items():
        for variable, flags in ((XLA_FLAGS, own), (LIBTPU_FLAGS, libtpu)):
            if name in flags and flags[name] != planned and name not in misplaced:
                yield HostFinding(
                    Level.WARNING,
                    f"{variable} sets {name} to {flags[name]}",
                    f"{planned}: the plan's times are for that, and its step is compiled with it",
                    f"leave it out of {variable}",
                )


def flags_of(text: str) -> Mapping[str, str]:
    """Parse the flags of a variable such as XLA_FLAGS: name -> value; true for a flag without a value."""
    pairs = (word.removeprefix("--").partition("=") for word in text.split() if word.startswith("--"))
    return {name: value if separator else "true" for name, separator, value in pairs}


def _compiler_options(subject: HostSubject) -> Mapping[str, str]:
    """Return the compiler options of the step, even if the plan does not exist yet."""
    if subject.plan is not None:
        return subject.plan.compiler_options
    return planned_options(subject.tpu_slice) if subject.tpu_slice is not None else {}


def _summary() -> str:
    names = (ADDRESS, PROCESS_COUNT, PROCESS_ID, PLATFORMS, XLA_FLAGS, LIBTPU_FLAGS)
    return (
        ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "no variable of JAX is set"
    )
