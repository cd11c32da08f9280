"""Compares installed versions with the tested ranges, and checks that JAX and Levanter fit each other.

The ranges are those of the installed packages' own metadata: shardplan's are the ones in pyproject.toml.
"""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES

OWN = "shardplan"
REQUIRING = {OWN: ("", "verify"), "jax": ("", "tpu"), **dict.fromkeys(LEVANTER_PACKAGES, ("",))}
"""Package -> the extras whose requirements are checked; "" for the requirements without an extra."""
OPTIONAL = "libtpu"
"""Package that only TPUs and verify require; the check of devices reports whether it is missing."""
RANGED_BY_LEVANTER = "transformers"
"""Package that shardplan requires without a version range, because Levanter's requirement has one."""
SAME_MODULES = (("haliax", "marin-haliax"), ("levanter", "marin-levanter"))
"""Pairs of packages that overwrite each other's modules."""


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Compare the installed versions with the tested ranges."""
    problems = [*_python_problems(), *_requirement_problems(), *_mixed_problems()]
    yield from problems or [HostFinding(Level.OK, ", ".join(_main_versions()))]


def _python_problems() -> Iterator[HostFinding]:
    version = platform.python_version()
    required = metadata.metadata(OWN)["Requires-Python"] if _version(OWN) else None
    if required is None:
        yield HostFinding(
            Level.WARNING,
            "shardplan runs from a folder, without metadata that says which versions it is tested with",
            remedy="install it: pip install -e . in its clone",
        )
    elif not SpecifierSet(required).contains(version, prereleases=True):
        yield HostFinding(
            Level.ERROR, f"Python {version}", f"Python {required}", "make an environment with another Python"
        )


def _requirement_problems() -> Iterator[HostFinding]:
    for package, requirement in _requirements():
        version = _version(requirement.name)
        required = f"{requirement.name}{requirement.specifier}, by {package} {_version(package)}"
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None and requirement.name != OPTIONAL:
            yield HostFinding(Level.ERROR, f"{requirement.name} is not installed", required, remedy)
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield HostFinding(Level.ERROR, f"{requirement.name} {version}", required, remedy)


def _mixed_problems() -> Iterator[HostFinding]:
    for first, second in SAME_MODULES:
        if _version(first) and _version(second):
            yield HostFinding(
                Level.ERROR,
                f"{first} {_version(first)} and {second} {_version(second)} are both installed",
                f"one of them: they write the same modules ({first})",
                f"pip uninstall {first} {second}, and install shardplan again",
            )


def _requirements() -> Iterator[tuple[str, Requirement]]:
    """Yield each requirement of installed packages that applies here, with the package that has it."""
    for package, extras in REQUIRING.items():
        merged: dict[str, Requirement] = {}
        for requirement in map(Requirement, (metadata.requires(package) if _version(package) else None) or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                merged.setdefault(requirement.name, requirement).specifier &= requirement.specifier
        yield from ((package, requirement) for requirement in merged.values())


def _main_versions() -> Iterator[str]:
    """Yield the versions of Python and of the packages that shardplan gives a range for."""
    yield f"Python {platform.python_version()}"
    for package, requirement in _requirements():
        if package == OWN and (requirement.specifier or requirement.name == RANGED_BY_LEVANTER):
            yield f"{requirement.name} {_version(requirement.name) or 'not installed'}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
