"""A kernel of Jupyter in a process that has made its imports already: `forked_kernel.py -f CONNECTION`."""

import os
import sys

import jax
from ipykernel.kernelapp import IPKernelApp

DEVICES = "JAX_NUM_CPU_DEVICES"


def take_devices(_):
    """Take over the number of devices that a cell has set, which JAX would read when the next cell imports it."""
    number = int(os.environ.get(DEVICES, -1))
    if number != jax.config.jax_num_cpu_devices:
        jax.config.update(DEVICES.lower(), number)


kernel = IPKernelApp.instance()
kernel.initialize(sys.argv[1:])
kernel.shell.events.register("pre_run_cell", take_devices)
kernel.start()
