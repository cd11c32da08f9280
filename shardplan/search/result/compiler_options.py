"""The compiler options that plans carry, and other sets worth trying: which help depends on the mapping.

They are libtpu's options, passed as jit's `compiler_options` or, at run time, in LIBTPU_INIT_ARGS.
"""

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

CURATED: dict[str, dict[str, str]] = {
    "default options": {},
    "no windowed einsum": NO_WINDOWED_EINSUM,
    "async collectives": ASYNC_COLLECTIVES,
    "async collectives, no windowed einsum": {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
}
"""Name -> options; `shardplan verify --options auto` tries each."""

PLANNED = CURATED["async collectives, no windowed einsum"]
"""The options of plans for TPUs, which their times are estimated for."""
