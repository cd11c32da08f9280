"""The TPU compiler in the test's own process, as it is set up for a process of its own elsewhere."""

import os

from shardplan.hardware import parse_slice
from shardplan.verify.topology import environment

os.environ.update(environment(parse_slice("v4-8")))
