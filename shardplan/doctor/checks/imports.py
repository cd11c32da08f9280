"""Checks that JAX and Levanter can be imported here, and that they have the functions that shardplan calls."""

from collections.abc import Iterator
from importlib import import_module, metadata

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.errors import ConfigError, one_line
from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES
from shardplan.runtime.deferred_packages import defer_unused_packages
from shardplan.runtime.environment import compute_on_cpu

MODULES = ("jax", "shardplan.runtime.private_jax", "haliax", "levanter.models.lm_model", "shardplan.checkpoint.load")
"""Modules that a run imports first, each after the ones that it needs."""


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Import the modules that a run imports, and start JAX on the CPU.

    A flag in XLA_FLAGS that JAX does not know ends the process when JAX starts.
    """
    compute_on_cpu()
    defer_unused_packages()
    for name in MODULES:
        try:
            import_module(name)
        except ConfigError as error:  # private_jax, of another version of JAX
            yield HostFinding(Level.ERROR, str(error))
            return
        except Exception as error:  # of a package that does not fit another one, of any kind
            yield HostFinding(
                Level.ERROR,
                f"{name} cannot be imported: {type(error).__name__}: {one_line(error)}",
                remedy="install the versions that shardplan is tested with (the check of versions names them)",
            )
            return
    import_module("jax").devices()
    versions = " and ".join(f"{package} {metadata.version(package)}" for package in ("jax", LEVANTER_PACKAGES[1]))
    yield HostFinding(Level.OK, f"{versions} can be imported, and JAX starts on the CPU")
