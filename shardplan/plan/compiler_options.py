"""Sets of compiler options worth trying; which of them help depends on the mapping, and only the compiler can say.

They are libtpu's, in effect through jit's `compiler_options` or, at run time, LIBTPU_INIT_ARGS.
"""

NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Products keep their all-gather instead of becoming loops of permutes and small products."""
ASYNC_COLLECTIVES = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
}
"""Collectives run beside the products, inside of fusions."""

CURATED: dict[str, dict[str, str]] = {
    "default options": {},
    "no windowed einsum": NO_WINDOWED_EINSUM,
    "async collectives": ASYNC_COLLECTIVES,
    "async collectives, no windowed einsum": {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
}
"""Name -> options, as `options: auto` tries them."""

PLANNED = CURATED["async collectives, no windowed einsum"]
"""The options that plans for TPUs carry, and that their times are estimated for."""
PLANNED_FOR_EXPERTS = {name: value for name, value in PLANNED.items() if not name.endswith("fuse_all_gather")}
"""Those of a training step with experts: with the gathers in fusions libtpu 0.0.42 fails on v5p with an internal error
(Mixtral-8x7B on v5p-64); without, the step and the peak were the same on tpu7x-64."""
