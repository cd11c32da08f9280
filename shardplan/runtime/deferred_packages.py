"""Defers the `__init__` of packages until a name that it defines is used."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

UNUSED = ("levanter", "datasets", "transformers.models")
"""Packages whose submodules shardplan uses, but nothing from their `__init__`.

They import trainers, trackers and readers of data sets; that of `transformers.models` reads the sources of all models.
"""


class _DeferredPackage(ModuleType):
    """A package whose submodules can be imported before its `__init__` has run."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = _ExecutedPackage  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class _ExecutedPackage(ModuleType):
    """A package whose `__init__` ran late; it reads names from the module that replaced it in `sys.modules`."""

    def __getattr__(self, name: str) -> Any:
        in_its_place = sys.modules[self.__name__]
        if in_its_place is self:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(in_its_place, name)


def defer_unused_packages() -> None:
    """Defer the slow `__init__` of packages if shardplan uses only their submodules."""
    for name in UNUSED:
        defer_package(name)


def defer_package(name: str) -> None:
    """Defer the `__init__` of an installed package until a name is used that is not one of its submodules.

    `importlib.util.LazyLoader` cannot be used here, because it executes a package when a second module imports it. A
    package that was imported already, or is not installed, is left unchanged.
    """
    if name in sys.modules or (spec := _find_spec(name)) is None:
        return
    package = module_from_spec(spec)
    package.__class__ = _DeferredPackage
    sys.modules[name] = package


def _find_spec(name: str) -> ModuleSpec | None:
    """Find a package as `importlib.util.find_spec` does, but without executing its parent packages."""
    outer, _, _ = name.rpartition(".")
    if not outer:
        return PathFinder.find_spec(name)
    outer_spec = _find_spec(outer)
    if outer_spec and outer_spec.origin is None:  # a namespace has no code, and its path is known when it is imported
        import_module(outer)
    return outer_spec and PathFinder.find_spec(name, outer_spec.submodule_search_locations)
