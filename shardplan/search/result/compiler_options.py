"""The compiler options that plans carry, and other sets worth trying: which help depends on the mapping.

They are libtpu's options, passed as jit's `compiler_options` or, at run time, in LIBTPU_INIT_ARGS.
"""

from shardplan.hardware import Slice

NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Matmuls keep their all-gather instead of becoming loops of collective-permutes and small matmuls."""
ASYNC_COLLECTIVES = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
}
"""Collectives run concurrently with matmuls, inside fusions."""
SPARSE_CORE_GATHERS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
}
"""All-gathers run on the sparse cores, beside matmuls, along one to three dimensions of the torus."""

OVERLAPPED_EXPERTS = {
    "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
"""Of models with routed experts: collectives run beside the kernels of grouped matmuls."""

TRAINING_VMEM_KIB = {"v5p": 65536, "v6e": 98304}
"""Generation -> vector memory that one operation of a training step may use, KiB: larger tiles of matmuls. Llama 3.1 8B
on v6e-8 takes 2.13 s a step with it, and 2.72 s without; 405B on v5p-1024 takes 125 s, where 146 s were the best
without (docs/log.md). Other generations were not tried."""

CURATED: dict[str, dict[str, str]] = {
    "default options": {},
    "no windowed einsum": NO_WINDOWED_EINSUM,
    "async collectives": ASYNC_COLLECTIVES,
    "async collectives, no windowed einsum": {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
    "async collectives, gathers on sparse cores, no windowed einsum": {
        **NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES, **SPARSE_CORE_GATHERS,
    },
}  # fmt: skip
"""Name -> options; `shardplan verify --options auto` tries each."""


def planned_options(hardware: Slice, has_experts: bool = False, is_training: bool = False) -> dict[str, str]:
    """Return the options of plans for a slice, which their times are estimated for.

    On v4 gathers overlap more in fusions than on sparse cores, and tpu7x uses its sparse cores by default
    (docs/log.md).

    Args:
        has_experts: whether the model has blocks of routed experts; larger tiles were not tried with these.
        is_training: whether the step is one of training.

    >>> from shardplan.hardware import parse_slice
    >>> planned_options(parse_slice("cpu-8"))
    {}
    """
    if hardware.is_cpu:
        return {}
    gathers = SPARSE_CORE_GATHERS if hardware.generation.gathers_on_sparse_cores else {}
    experts = OVERLAPPED_EXPERTS if has_experts and hardware.generation.gathers_on_sparse_cores else {}
    vmem = TRAINING_VMEM_KIB.get(hardware.generation.name) if is_training and not has_experts else None
    tiles = {} if vmem is None else {"xla_tpu_scoped_vmem_limit_kib": str(vmem)}
    return {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES, **gathers, **experts, **tiles}
