"""Compiles one program in a separate process: `python -m shardplan.verify.compiler REQUEST COMPILED DUMP`."""

import gc
import sys

from shardplan.runtime.deferred_packages import defer_unused_packages

gc.disable()  # nearly everything that is made here stays
defer_unused_packages()

from shardplan.verify.compiler.worker import main  # noqa: E402 - after what makes its imports faster

main(*sys.argv[1:])
