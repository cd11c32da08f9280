"""The compiler options that plans carry, and other sets worth trying: which help depends on the mapping.

They are libtpu's options, passed as jit's `compiler_options` or, at run time, in LIBTPU_INIT_ARGS.
"""

from shardplan.model.levanter_compat import LIBTPU_FUSES_ALL_GATHERS

FUSED_ALL_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Matmuls keep their all-gather instead of becoming loops of collective-permutes and small matmuls."""
ASYNC_COLLECTIVES = {
    "xla_tpu_enable_async_collective_fusion": "true",
    **({FUSED_ALL_GATHERS: "true"} if LIBTPU_FUSES_ALL_GATHERS else {}),
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
PLANNED_FOR_EXPERTS = {name: value for name, value in PLANNED.items() if name != FUSED_ALL_GATHERS}
"""The options of a training step with experts, without fused all-gathers: with them libtpu 0.0.42 fails on v5p with an
internal error (Mixtral-8x7B on v5p-64); step time and peak without them are equal on tpu7x-64."""
