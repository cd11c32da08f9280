"""Parses the `trainer:` section of a Levanter configuration into a mesh, mappings, batch and types.

Imports neither Levanter nor JAX, so that errors of a configuration are reported instantly. Files of levanter 1.2 are
converted first: see `flat_schema`.
"""

from dataclasses import dataclass, replace
from typing import Any

from shardplan.errors import ConfigError, nearest
from shardplan.levanter_config.mesh_section import parse_mesh_section, sharded_axes
from shardplan.levanter_config.section import AxisLists, MappingEntry, SectionReader, short_repr
from shardplan.plan.workload.workload import Workload

TRAINER_KEYS = (
    "allow_nondivisible_batch_size",
    "checkpointer",
    "crash_on_inf",
    "crash_on_nan",
    "allow_partial_checkpoint",
    "distributed",
    "id",
    "initialize_from",
    "jax_compilation_cache_dir",
    "jax_config",
    "load_checkpoint",
    "load_checkpoint_path",
    "log_dir",
    "log_jaxprs",
    "log_xla_hlo",
    "max_eval_batches",
    "mesh",
    "model_averaging",
    "mp",
    "num_train_steps",
    "per_device_eval_parallelism",
    "per_device_parallelism",
    "profiler",
    "progress_watchdog",
    "quantization",
    "require_accelerator",
    "seed",
    "shutdown_at_exit",
    "steps_per_eval",
    "tracker",
    "train_batch_size",
    "use_explicit_mesh_axes",
    "wandb",
    "watch",
    "xla_dump_upload",
)
"""Keys of the trainer section."""

DEFAULT_TRAIN_BATCH_SIZE = 512
"""Value of `train_batch_size` if the file omits it."""

# `half` is float16 on other accelerators than TPUs; plans are for TPUs.
DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "bfloat16", "half"), "bfloat16"),
    **dict.fromkeys(("f16", "float16"), "float16"),
    **dict.fromkeys(("f32", "float32", "full"), "float32"),
}
"""Name of a type in `mp` -> name of the type."""
DEFAULT_POLICY = "f32"
"""Value of `mp` if the file omits it."""
DTYPE_ROLES = {"p": "p", "params": "p", "c": "c", "compute": "c", "o": "o", "output": "o"}
"""Key in `mp` -> abbreviation of the key."""


@dataclass(frozen=True)
class BatchStage:
    """One stage of a schedule of batch sizes."""

    start: int
    """The first training step with this batch size."""
    size: int
    """Sequences per step."""


@dataclass(frozen=True)
class TrainerSection:
    """The mesh, mappings, batch and types that a trainer section gives Levanter."""

    mesh: dict[str, int]
    """Mesh axis (replica, data, model) -> size, major to minor; the product is the number of devices."""
    compute_mapping: AxisLists
    """Sharding of activations, and of parameters in use; a logical axis that is absent is replicated."""
    param_mapping: AxisLists
    """Sharding of stored parameters; a logical axis that is absent is replicated."""
    batch: int | None
    """Sequences per step, the largest number of a schedule; None if the file omits it."""
    param_dtype: str
    """bfloat16, float16 or float32."""
    compute_dtype: str
    microbatch: int | None
    """Sequences per microbatch, over all devices (`per_device_parallelism` on each); None for the whole batch."""
    batch_axis: str
    """Name of the logical axis of the sequences."""
    is_batch_mapped: bool
    """True if the batch axis is mapped to a mesh axis, even one of size 1."""
    batch_shards: int
    """Number of shards of the batch, as the trainer counts them."""
    compute_entries: tuple[MappingEntry, ...]
    """Entries that make up `compute_mapping`; of several for one logical axis the last one wins."""
    param_entries: tuple[MappingEntry, ...]
    """Entries that make up `param_mapping`; of several for one logical axis the last one wins."""
    stages: tuple[BatchStage, ...] = ()
    """The stages of a schedule of batch sizes; empty for one batch size."""
    allows_padding: bool = False
    """Whether Levanter's data loader pads a batch that is not a multiple of the batch shards."""
    eval_batch: int | None = None
    """Sequences per step of an evaluation; None if the file does not give them per device."""

    def apply_to(self, workload: Workload) -> Workload:
        """Return `workload` with the batch, microbatches and types of this section."""
        return replace(
            workload,
            batch=(self.batch if workload.is_training else self.eval_batch or self.batch) or workload.batch,
            param_dtype=self.param_dtype,
            compute_dtype=self.compute_dtype,
            microbatches=self.microbatches if workload.is_training else 1,
        )

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a training step; 1 if they do not divide the batch."""
        if self.batch is None or self.microbatch is None or self.batch % self.microbatch:
            return 1
        return self.batch // self.microbatch


def parse_trainer_section(values: Any, devices: int, slices: int = 1) -> TrainerSection:
    """Parse the content `values` of a trainer section, for `devices` devices in `slices` equal slices.

    Raises:
        MeshSizeError: sizes of mesh axes whose product is not `devices`.
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    trainer = SectionReader("trainer", values)
    if devices % slices:
        raise ConfigError(f"{devices} devices cannot be split into {slices} slices of equal size")
    parsed = parse_mesh_section(trainer.subsection("mesh"), devices, slices)
    param_dtype, compute_dtype = _dtypes(trainer)
    per_device = trainer.size("per_device_parallelism", -1, allow_minus_one=True)
    per_device_eval = trainer.size("per_device_eval_parallelism", per_device, allow_minus_one=True)
    if per_device_eval == -1:
        per_device_eval = per_device
    return TrainerSection(
        parsed.mesh,
        sharded_axes(parsed.compute),
        sharded_axes(parsed.params),
        _batch(trainer, parsed.batch_shards),
        param_dtype,
        compute_dtype,
        None if per_device == -1 else per_device * parsed.batch_shards,
        parsed.batch_axis,
        parsed.is_batch_mapped,
        parsed.batch_shards,
        tuple(parsed.compute),
        tuple(parsed.params),
        tuple(_stages(trainer)),
        trainer.values.get("allow_nondivisible_batch_size") is True,
        None if per_device_eval == -1 else per_device_eval * parsed.batch_shards,
    )


def _batch(trainer: SectionReader, shards: int) -> int | None:
    """Read the number of sequences per step of a batch with `shards` shards; None if the file omits it."""
    stages = _stages(trainer)
    if stages:
        return max(stage.size for stage in stages)
    if "train_batch_size" not in trainer.values:
        return None
    batch = trainer.size("train_batch_size", None, allow_minus_one=True)
    if batch != -1:
        return batch
    per_device = trainer.size("per_device_parallelism", -1, allow_minus_one=True)
    if per_device == -1:
        raise ConfigError("trainer.train_batch_size and trainer.per_device_parallelism are both -1; set one of them")
    return per_device * shards


def _stages(trainer: SectionReader) -> list[BatchStage]:
    """Read the stages of a schedule of batch sizes; none if the file has one batch size."""
    value = trainer.values.get("train_batch_size")
    if not isinstance(value, list):
        return []
    stages = []
    for index, step in enumerate(value):
        stage = SectionReader(f"trainer.train_batch_size[{index}]", step)
        start = 0 if stage.values.get("start") == 0 else stage.size("start", None)
        stages.append(BatchStage(start, stage.size("value", None)))
    return stages


def _dtypes(trainer: SectionReader) -> tuple[str, str]:
    """Read the types of stored parameters and of the computation from the mixed-precision policy `mp`."""
    policy = trainer.values.get("mp", DEFAULT_POLICY)
    if not isinstance(policy, str):
        raise ConfigError(f"trainer.mp is {short_repr(policy)}; it must be text such as 'p=f32,c=bf16'")
    dtypes = {"p": "float32"}
    for part in policy.split(",") if "=" in policy else [f"p={policy}"]:
        role, _, name = part.partition("=")
        if role not in DTYPE_ROLES:
            raise ConfigError(f"trainer.mp is {short_repr(policy)}: unknown key {role!r}; {nearest(role, DTYPE_ROLES)}")
        if name not in DTYPE_NAMES:
            raise ConfigError(
                f"trainer.mp is {short_repr(policy)}: unknown type {name!r}; {nearest(name, DTYPE_NAMES)}"
            )
        dtypes[DTYPE_ROLES[role]] = DTYPE_NAMES[name]
    return dtypes["p"], dtypes.get("c", dtypes["p"])
