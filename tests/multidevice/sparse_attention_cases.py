"""Layers of Native Sparse Attention on meshes of virtual devices, for tests of several modules."""

from dataclasses import dataclass, field, replace

import haliax as hax
import jax
import jax.numpy as jnp
import nsa_oracle as oracle
import numpy as np
from jax.sharding import AxisType, Mesh

from shardplan.decoder import NativeSparseAttention, NativeSparseConfig, SelectedMethod
from shardplan.positions.sequence_layout import SequenceLayout

BASE = oracle.Nsa(24, 2, 3, 8, 6, block=8, stride=4, selection_block=8, selected=5, window=10)
DENSE, GATHERED, KERNEL = SelectedMethod
TILE = 4
LONG = 1000
"""Queries per chunk of a device that computes one chunk."""


@dataclass(frozen=True)
class Case:
    mesh: dict[str, int]
    mapping: dict[str, str | tuple[str, ...]]
    positions: int = 96
    layout: str = "contiguous"
    batch: int = 1
    changes: dict[str, object] = field(default_factory=dict)
    method: SelectedMethod = DENSE
    queries_per_chunk: int = LONG
    params: dict[str, str] = field(default_factory=dict)
    """Parameter sharding."""

    @property
    def nsa(self):
        return replace(BASE, **self.changes)

    @property
    def config(self):
        return NativeSparseConfig(**vars(self.nsa))

    @property
    def devices(self):
        """Devices that share the positions."""
        names = self.mapping.get("position", ())
        return int(np.prod([self.mesh[name] for name in ((names,) if isinstance(names, str) else names)]))

    @property
    def order(self):
        """The position of every element of the array."""
        return SequenceLayout(self.positions, self.devices, kind=self.layout).positions()

    def run(self, function, *arguments):
        """Run a function on the mesh, with the axis mapping."""
        devices = np.array(jax.devices()[: int(np.prod([*self.mesh.values()]))]).reshape([*self.mesh.values()])
        mesh = Mesh(devices, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(self.mesh))
        with jax.set_mesh(mesh), hax.axis_mapping(self.mapping):
            return function(*arguments)

    def alone(self):
        """The same on one device."""
        return replace(self, mesh={"data": 1}, mapping={}, params={}, layout="contiguous", queries_per_chunk=LONG)


def positions(devices, length=96, **others):
    return Case({"sequence": devices}, {"position": "sequence"}, length, **others)


MIXED = Case(
    {"model": 2, "sequence": 2, "data": 2},
    {"batch": "data", "position": "sequence", "kv_head": "model"},
    layout="zigzag",
    batch=2,
    params={"embed": "data", "kv_head": "model"},
    method=GATHERED,
    queries_per_chunk=32,
)
CASES = {
    "fsdp 8": Case({"data": 8}, {"batch": "data"}, 40, batch=8, params={"embed": "data"}),
    "groups 2": Case({"model": 2}, {"kv_head": "model"}, batch=2, changes={"compression": "mean"}, method=GATHERED),
    "positions 2": positions(2, batch=2, method=GATHERED, queries_per_chunk=32),
    "positions 3": positions(3, changes={"block": 4, "value_size": 8}),
    "positions 4": positions(4, changes={"window": 200, "compression": "linear"}),
    "positions 5": positions(5, 80, changes={"window": 40, "theta": None}),
    "positions 8": positions(8, 128, changes={"window": 40, "initial": 0, "local": 1}, method=GATHERED),
    "zigzag 2": positions(2, layout="zigzag", changes={"window": 40, "compressed_rope": "none"}),
    "zigzag 3": positions(3, layout="zigzag", changes={"window": 30, "compression": "linear"}, queries_per_chunk=10),
    "zigzag 8": positions(8, 128, layout="zigzag", changes={"window": 20}),
    # minor before major in the order of the mesh, and an axis that shards nothing
    "positions 6 over two axes": Case({"b": 3, "a": 2}, {"position": ("a", "b")}, changes={"window": 40}),
    "replicated": Case({"replica": 2, "b": 2, "a": 2}, {"position": ("a", "b")}, 64, layout="zigzag"),
    "mixed": MIXED,
    "kernel, zigzag 2": positions(2, 64, layout="zigzag", method=KERNEL),
    "kernel, replicated": Case({"replica": 2}, {}, 40, method=KERNEL),
    "mixed 6": Case({"model": 2, "sequence": 3}, {"position": "sequence", "kv_head": "model"}, batch=2),
}


def named(x):
    return hax.named(jnp.asarray(x, jnp.float32), ("batch", "position", "embed"))


def make(case, seed=1):
    """The layer, an input in the order of the case, and a cotangent."""
    layer = NativeSparseAttention.from_arrays(case.config, oracle.make_parameters(case.nsa, seed))
    x, cotangent = np.random.default_rng(2).normal(size=(2, case.batch, case.positions, case.nsa.embed))[
        :, :, case.order
    ]
    return hax.shard(layer, case.params) if case.params else layer, named(x), named(cotangent)


def call(case, layer, x, **settings):
    return layer(
        x, case.method, layout=case.layout, queries_per_chunk=case.queries_per_chunk, query_tile=TILE, **settings
    )
