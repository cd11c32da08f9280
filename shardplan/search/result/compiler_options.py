"""The compiler options of a plan, and other sets worth trying, because the best set depends on the mapping.

They are libtpu's options, passed as jit's `compiler_options` or, at run time, in LIBTPU_INIT_ARGS.
"""

from shardplan.cost.calibration import calibration_of, load_calibration
from shardplan.hardware import Slice
from shardplan.program.tasks import Step

NO_WINDOWED_EINSUM = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Options by which matmuls keep their all-gather, instead of becoming loops of collective-permutes and small
matmuls."""
ASYNC_COLLECTIVES = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
}
"""Options by which collectives run concurrently with matmuls, inside fusions."""
SPARSE_CORE_GATHERS = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
}
"""Options by which all-gathers run on the sparse cores, beside matmuls, along one to three torus dimensions."""

OVERLAPPED_EXPERTS = {
    "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
}
"""Options, for models with routed experts, by which collectives run beside the kernels of grouped matmuls."""

EARLY_HOST_COPIES = {"xla_tpu_scheduler_percent_shared_memory_limit": "1000"}
"""Options, for steps that copy activations to hosts, by which copies back start early, at any cost in memory.

By default it does not where a program nears the limit of the memory, and the core waits for each copy."""

TILE_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
"""Option for the vector memory that one operation may use; shardplan/cost/calibration.json has its values."""

CURATED: dict[str, dict[str, str]] = {
    "default options": {},
    "no windowed einsum": NO_WINDOWED_EINSUM,
    "async collectives": ASYNC_COLLECTIVES,
    "async collectives, no windowed einsum": {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
    "async collectives, gathers on sparse cores, no windowed einsum": {
        **NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES, **SPARSE_CORE_GATHERS,
    },
}  # fmt: skip
"""Name -> set of options; `shardplan verify --options auto` tries each set."""


def planned_options(hardware: Slice, step: Step | None = None) -> dict[str, str]:
    """Return the compiler options of plans for a slice; the estimated times assume these options.

    On v4 gathers overlap more in fusions than on sparse cores, and tpu7x uses its sparse cores by default
    (docs/log.md).

    Args:
        step: what is planned; default: a step without routed experts and without copies to hosts.

    >>> from shardplan.hardware import parse_slice
    >>> planned_options(parse_slice("cpu-8"))
    {}
    """
    if hardware.is_cpu:
        return {}
    generation = hardware.generation
    options = {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES}
    if generation.gathers_on_sparse_cores:
        options |= SPARSE_CORE_GATHERS
        if step is not None and step.expert_blocks:
            options |= OVERLAPPED_EXPERTS
    calibration = load_calibration(generation.name) if step is None else calibration_of(step, hardware)
    if calibration.vmem_kib is not None:
        options[TILE_MEMORY] = str(calibration.vmem_kib)
    if step is not None and step.copies_to_hosts:
        options |= EARLY_HOST_COPIES
    return options
