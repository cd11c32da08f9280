"""Packages whose `__init__` is executed only if something asks for a name that it defines."""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _DeferredPackage(ModuleType):
    """A package of which submodules can be imported before its `__init__` has been executed."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer_package(name: str) -> None:
    """Put off the `__init__` of an installed package until a name is asked for that no submodule has.

    `importlib.util.LazyLoader` does not serve here: it executes a package when a second module imports it. A package
    that has been imported, or is not installed, is left alone.
    """
    if name in sys.modules or (spec := find_spec(name)) is None:
        return
    package = module_from_spec(spec)
    package.__class__ = _DeferredPackage
    sys.modules[name] = package
