"""What processes do together does not depend on the host of each: on its processors, memory, caches or language."""

import math
import os
from collections import namedtuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import stack, tensor_view
from shardplan.checkpoint.transfer import schedule, stream
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.transfer import DeviceMesh
from shardplan.storage.folder import REMOTE, ReadTuning

pytestmark = pytest.mark.slow

Host = namedtuple("Host", "processors memory is_cached language")
HOSTS = st.builds(
    Host,
    st.sampled_from([1, 2, 7, 40]),
    st.sampled_from([2**30, 2**34, 2**40]),
    st.booleans(),
    st.sampled_from(["C", "tr_TR.UTF-8"]),
)


class Nothing:
    """A file whose reads return at once, and shards that are not kept."""

    name, size, version, is_shared = "model.safetensors", 10**9, "1", True

    def __init__(self, tuning=None):
        self.tuning = tuning

    def read_into(self, offset, buffer):
        """See `File.read_into`."""

    def window(self, device, start, shape):
        """See `Destination.window`."""

    def put(self, device, start, part):
        """See `Destination.put`."""

    def wait(self):
        """See `Destination.wait`."""

    def finish(self):
        """See `Destination.finish`."""


@st.composite
def models(draw):
    """Draw a mesh of at most 8 devices, its processes, and a model: path -> layers, shape of a layer, and sharding."""
    sizes = draw(st.sampled_from([(2, 4), (4, 2), (1, 8), (2, 2), (2, 3)]))
    axes = dict(zip(("data", "model"), sizes, strict=True))
    per_process = draw(st.sampled_from([1, 2]))
    arrays = {}
    for name in "abc":
        spec = draw(st.sampled_from([((), ()), (("data",), ()), ((), ("data",)), (("model",), ("data",))]))
        shape = tuple(math.prod(axes[a] for a in each) * draw(st.integers(1, 16)) for each in spec)
        arrays[name] = draw(st.integers(1, 3)), shape, spec
    return axes, per_process, arrays


def execute(model, budget, process, host):
    """Load a model in one process of several, and return the description of its load and the collectives it enters."""
    axes, per_process, arrays = model
    count = math.prod(axes.values())
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))
    file = Nothing(ReadTuning(4 * 2**20, 2 * host.processors) if host.is_cached else REMOTE)
    requests, tensors, offset = {}, {}, 8
    for path, (layers, shape, spec) in arrays.items():
        names = [f"{path}.{i}" for i in range(layers)]
        for name in names:
            tensors[name] = Tensor(file, offset, shape, np.dtype(np.float32))
            offset += tensors[name].nbytes
        view = stack([tensor_view(name, shape) for name in names], 0)
        requests[path] = ArrayRequest(view, ((), *spec), np.dtype(np.float32))
    entered = []

    def exchange_rows(mesh, transfer, rows, dtype, decoding):
        [shape] = {part.shape for part in rows.values()}
        entered.append((transfer.path, transfer.strategy.collectives, transfer.rows, shape, transfer.shape, str(dtype)))
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: process)
        patch.setattr(os, "cpu_count", lambda: host.processors)
        patch.setattr(os, "sysconf", lambda name: 4096 if "SIZE" in name else host.memory // 4096)
        patch.setenv("LANG", host.language)
        patch.setattr(
            stream, "DeviceMesh", lambda sizes, _: DeviceMesh(sizes, tuple(i // per_process for i in range(count)))
        )
        patch.setattr(stream, "exchange_rows", exchange_rows)
        patch.setattr(stream._ArrayStream, "_make_destination", lambda self, path: Nothing())
        patch.setattr(schedule, "MAX_REREAD_BYTES", 0)  # because the arrays are small
        load = stream._ArrayStream(requests, tensors, mesh, budget, None)
        load.run(lambda nbytes, array: None)
    return load.describe(), entered


@given(models(), st.sampled_from([3_000, 10**5, 300 * 2**20]), st.data())
@settings(max_examples=40)
def test_all_hosts_enter_the_same_collectives(model, budget, data):
    """Their transfers, with all shapes, are equal, and so is what the processes compare before."""
    axes, per_process, _ = model
    processes = math.prod(axes.values()) // per_process
    first, *others = (execute(model, budget, process, data.draw(HOSTS)) for process in range(processes))
    assert all(other == first for other in others)
