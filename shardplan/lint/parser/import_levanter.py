"""Imports Levanter's training program with all its configuration classes, as fast as possible.

What its packages compute while they are imported, and parsing does not ask for, is put off until something asks: the
`__init__` of three packages, and the table of all installed distributions that `transformers` makes, for which the
files of every distribution are read. Of `wandb`, Levanter names a class while it is imported and uses nothing before a
run starts, so a module that has every name stands in its place.
"""

import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from types import ModuleType
from typing import Self

from shardplan.runtime.deferred_packages import defer_package

DEFERRED = ("datasets", "transformers.models", "google.cloud.storage")
"""Packages whose `__init__` takes long, and which parsing does not need."""


def import_levanter() -> None:
    """Import Levanter before the first request arrives, because the imports take most of the time."""
    for name in DEFERRED:
        defer_package(name)
    if find_spec("wandb"):
        sys.modules["wandb"] = _NamesOnly("wandb")
    sys.modules.setdefault("lm_eval", None)  # type: ignore[arg-type]  # Levanter parses alike without it, and sooner
    importlib.metadata.packages_distributions = _LazyDistributions
    gc.disable()  # nearly all that an import makes stays, and the collector would walk over it again and again
    try:
        importlib.import_module("levanter.main.train_lm")
        importlib.import_module("shardplan.decoder.section")  # a type of `model` sections
    finally:
        gc.enable()
        importlib.metadata.packages_distributions = packages_distributions


class _LazyDistributions(Mapping[str, list[str]]):
    """A lazy result of `importlib.metadata.packages_distributions`, computed at the first look-up."""

    @cached_property
    def _distributions(self) -> Mapping[str, list[str]]:
        return packages_distributions()

    def __getitem__(self, package: str) -> list[str]:
        return self._distributions[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._distributions)

    def __len__(self) -> int:
        return len(self._distributions)


class _NamesOnly(ModuleType):
    """A stand-in for a package that is used only in type annotations; calling it raises an error."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no {name} here")
        return self

    def __call__(self, *_: object) -> None:
        raise TypeError(f"{self.__name__} has only names of types while a file is parsed")
