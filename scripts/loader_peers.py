"""Other loaders of checkpoints, for scripts/bench_loader.py: each function returns the call to be timed."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK = 4 * 2**20
TENSOR_AXES = {
    "embed_tokens": ("vocab", "embed"), "lm_head": ("vocab", "embed"), "q_proj": ("kv_head", "embed"),
    "k_proj": ("kv_head", "embed"), "v_proj": ("kv_head", "embed"), "o_proj": ("embed", "kv_head"),
    "gate_proj": ("mlp", "embed"), "up_proj": ("mlp", "embed"), "down_proj": ("embed", "mlp"),
}  # fmt: skip
"""Logical axes of a Llama's tensors; of axes merged into one dimension, the first; norms are replicated."""


def preadv_load(checkpoint: str, plan: Any) -> Callable[[], Any]:
    """Read all bytes with bare parallel `preadv` into memory that has been touched: the speed limit of the medium."""
    del plan
    import numpy as np

    files = sorted(Path(checkpoint).glob("*.safetensors"))
    buffer = np.zeros(sum(file.stat().st_size for file in files), np.uint8)
    buffer[::4096] = 1
    jobs, start = [], 0
    for file in files:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size
        jobs += [(descriptor, offset, start + offset, min(CHUNK, size - offset)) for offset in range(0, size, CHUNK)]
        start += size
    view = memoryview(buffer)

    def load() -> int:
        with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
            return sum(pool.map(lambda job: os.preadv(job[0], [view[job[2] : job[2] + job[3]]], job[1]), jobs))

    return load


def orbax_load(checkpoint: str, plan: Any) -> Callable[[], Any]:
    """Load with Orbax v1's safetensors layout: tensors sharded by the plan's mapping, not stacked into a model."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint.experimental.v1 as ocp

    target = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for name, (shape, sharding) in tensor_shardings(checkpoint, plan).items()
    }
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS

    def load() -> Any:
        with context:
            return ocp.load(Path(checkpoint).absolute(), target)

    return load


def maxtext_load(checkpoint: str, plan: Any) -> Callable[[], Any]:
    """Load as MaxText does: each device reads a contiguous part of every tensor; layers are stacked and resharded."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from safetensors import safe_open

    shardings = tensor_shardings(checkpoint, plan)
    mesh = next(iter(shardings.values()))[1].mesh
    flat = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def load() -> dict[str, Any]:
        groups: dict[str, list[tuple[str, Any]]] = {}
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            with safe_open(file, "flax") as tensors:
                for name in tensors.keys():  # noqa: SIM118  it is not a mapping
                    part = tensors.get_slice(name)
                    shape = tuple(part.get_shape())
                    array = jax.make_array_from_callback(shape, flat, lambda index, part=part: part[index[0]])
                    kind = ".".join(word for word in name.split(".") if not word.isdecimal())
                    groups.setdefault(kind, []).append((name, array))
        return {
            kind: jax.device_put(jnp.stack([array for _, array in layers]), stack_sharding(shardings[layers[0][0]][1]))
            for kind, layers in groups.items()
        }

    def stack_sharding(sharding: Any) -> Any:
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))

    return load


def tensor_shardings(checkpoint: str, plan: Any) -> Mapping[str, tuple[tuple[int, ...], Any]]:
    """Return tensor of the checkpoint -> its shape, and its sharding by the plan's parameter mapping."""
    from jax.sharding import NamedSharding, PartitionSpec
    from safetensors import safe_open

    from shardplan.execution.device_mesh import make_mesh

    mesh = make_mesh(plan)
    tensor_specs = {}
    for file in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is not a mapping
                axes = next((axes for word, axes in TENSOR_AXES.items() if word in name), ())
                spec = PartitionSpec(*(tuple(plan.param_mapping.get(axis, ())) or None for axis in axes))
                tensor_specs[name] = (tuple(tensors.get_slice(name).get_shape()), NamedSharding(mesh, spec))
    return tensor_specs
