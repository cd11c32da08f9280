"""Synonyms of configuration keys, as MaxText, Levanter, transformers and launchers name them."""

from collections.abc import Collection

from shardplan.errors import closest, fold

KEY_SYNONYMS = {
    "workload.batch": (
        "batch_size",
        "train_batch_size",
        "eval_batch_size",
        "global_batch_size",
        "per_device_batch_size",
        "bs",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
    ),
    "workload.position": (
        "seq_len",
        "seq_length",
        "sequence_length",
        "seqlen",
        "max_seq_len",
        "max_seq_length",
        "max_target_length",
        "max_length",
        "context_length",
        "context",
        "block_size",
        "tokens",
        "positions",
        "model_max_length",
    ),
    "workload.param_dtype": ("dtype", "torch_dtype", "weight_dtype", "precision", "params_dtype"),
    "workload.compute_dtype": ("activation_dtype", "amp", "mp"),
    "workload.gradient_checkpointing": ("remat", "remat_policy", "checkpointing", "activation_checkpointing"),
    "workload.microbatches": (
        "gradient_accumulation_steps",
        "gradient_accumulation",
        "grad_accum",
        "num_microbatches",
        "accumulation_steps",
    ),
    "workload.optimizer": ("optim", "opt_type"),
    "workload.kind": ("mode", "task_type", "workload_type"),
    "mesh.model": (
        "tensor",
        "tp",
        "tensor_parallelism",
        "tensor_parallel_size",
        "ici_tensor_parallelism",
        "mp_size",
        "model_parallel",
        "tensor_parallel",
    ),
    "mesh.data": ("fsdp", "ici_fsdp_parallelism", "data_parallel", "dp", "data_parallelism", "ici_data_parallelism"),
    "mesh.replica": ("replicas", "replica_dcn", "dcn_data_parallelism", "replica_ici", "num_replicas"),
    "hardware.slice": (
        "tpu",
        "tpu_type",
        "accelerator",
        "accelerator_type",
        "topology",
        "device",
        "devices",
        "tpu_topology",
        "chip",
        "compile_topology",
        "hardware",
        "num_slices",
        "slices",
    ),
    "model.ref": (
        "checkpoint",
        "pretrained",
        "model_name_or_path",
        "model_path",
        "load_parameters_path",
        "hf_path",
        "initialize_from_hf",
        "hf_ref",
        "model_id",
    ),
    "model.config": ("model_name", "config_json", "hf_config"),
    "data.path": ("dataset", "dataset_path", "texts", "input", "data_path", "train_file", "validation_file"),
    "data.max_documents": ("limit", "max_samples", "max_examples", "num_samples", "max_texts"),
    "task.stride": ("step",),
    "output": ("output_dir", "output_path", "results", "out", "base_output_directory"),
    "to": ("launcher", "target", "platform", "scheduler"),
    "launch.hosts": ("nodes", "num_nodes", "num_hosts", "nnodes", "num_processes"),
    "launch.environment": ("env", "env_vars"),
    "launch.name": ("job_name", "run_name", "workload_name"),
    "launch.image": ("docker_image", "docker", "container"),
    "compiler.jobs": ("workers", "num_workers", "parallelism", "threads"),
    "compiler.seconds": ("timeout",),
    "load.gib": ("budget", "max_memory", "memory_limit"),
    "format": ("output_format",),
    "tracker.kind": ("tracker", "report_to", "logger"),
}
"""Key -> other names of the key's last part."""
_KEY_OF = {fold(name): key for key, names in KEY_SYNONYMS.items() for name in names}


def nearest_key(name: str, keys: Collection[str]) -> str | None:
    """Return the valid key that an unknown dotted name means; None if no key is similar.

    The last part of the name is compared first: with the last parts of all keys, then with synonyms, then by similarity
    with keys of the same section.
    """
    section, _, last = name.rpartition(".")
    if section in keys:
        return section
    same = [key for key in keys if fold(key.rpartition(".")[2]) == fold(last)]
    if same:
        return closest(name, same, 0) or same[0]
    meant = synonym_of(name, keys)
    if meant is not None:
        return meant
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    close = closest(last, siblings)
    return siblings[close] if close is not None else closest(name, _similar_last_parts(last, keys))


def synonym_of(name: str, keys: Collection[str]) -> str | None:
    """Return the key of `keys` for which `KEY_SYNONYMS` lists this name; None if there is none."""
    meant = _KEY_OF.get(fold(name.rpartition(".")[2]))
    return meant if meant in keys else None


def _similar_last_parts(last: str, keys: Collection[str]) -> list[str]:
    """Return the keys with a similar last part; whole names are too similar within one section."""
    parts = {key.rpartition(".")[2] for key in keys}
    similar = {part for part in parts if closest(last, [part]) is not None}
    return [key for key in keys if key.rpartition(".")[2] in similar]
