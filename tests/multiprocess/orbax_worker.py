"""One of several processes that export a model to Orbax: `orbax_worker.py SOURCE TARGET FAULT`.

The fault "full" is an error of the disk while this process writes its shards, and "killed" ends it there. With
"replicated" there is none, and all devices have all arrays.
"""

# ruff: noqa: E402 - the first import makes those after it faster

import os
import signal
import sys

from shardplan.runtime.deferred_packages import defer_unused_packages

defer_unused_packages()

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from shardplan import load_pretrained, save_orbax
from shardplan.errors import ShardplanError
from shardplan.runtime.devices import start_devices


def main(source: str, target: str, fault: str) -> None:
    start_devices("cpu-4", 4, is_cpu=True)
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("data",))):
        model = load_pretrained(source, axis_mapping={} if fault == "replicated" else {"embed": "data"})
        if fault in ("full", "killed"):
            ocp.CompositeCheckpointHandler.save = full if fault == "full" else killed
        save_orbax(model, target, {})


def full(*_, **__):
    raise OSError(28, "No space left on device")


def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ShardplanError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
