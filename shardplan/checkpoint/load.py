"""Load a Hugging Face checkpoint into a sharded Levanter model.

Three layers: `load_pretrained` and `HFCheckpointConverter` choose the model, mesh and mapping; `stream_checkpoint`
matches the model with the tensors of the checkpoint; `transfer.stream.stream_arrays` reads the arrays.
"""

import functools
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping, current_thread_local_mapping, pspec_for_axis
from jax.sharding import Mesh, PartitionSpec
from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from levanter.compat.hf_checkpoints import RepoRef

from shardplan.checkpoint.best_effort import best_effort_sharding
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import check_tensors, read_index
from shardplan.checkpoint.format.integrity import CheckedFolder, check_files
from shardplan.checkpoint.format.shared_index import read_shared_index
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram, expected_tensors, trace_program
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.transfer.stream import DEFAULT_BUDGET, stream_arrays
from shardplan.errors import CheckpointError, ConfigError, check_argument
from shardplan.model.hf_config import read_config
from shardplan.model.inspect import named_leaves, parameters_of
from shardplan.model.levanter_compat import RESIZES_VOCAB
from shardplan.model.own_model import CLASS_KEY
from shardplan.model.registry import (
    SUPPORTED_MODELS,
    abstract_module,
    build_model,
    levanter_config_class,
    own_class_name,
    transformers_config,
)
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.plan import Plan
from shardplan.runtime.processes.activity import DEADLINE_S
from shardplan.runtime.processes.group import open_process_group
from shardplan.step.device_mesh import make_mesh
from shardplan.storage import Folder, open_folder


def load_pretrained(
    ref: str | RepoRef,
    *,
    plan: Plan | None = None,
    axis_mapping: ResourceMapping | None = None,
    dtype: Any = None,
    config: Any = None,
    budget: int = DEFAULT_BUDGET,
    checksum: bool = False,
) -> Any:
    """Load a Hugging Face checkpoint into a Levanter model, every array streamed straight into its sharding.

    Every process of the mesh calls this with the same arguments.

    Args:
        ref: repository of the Hugging Face hub (org/model@revision or Levanter's `RepoRef`), or folder: a local one, or
            a gs://, s3://, az:// or http(s):// one.
        plan: gives the mesh and the sharding of every parameter.
        axis_mapping: logical axis -> mesh axes, instead of a plan; default: the current `hax.axis_mapping`.
            Without a plan, a mapping or a current mapping, every array gets `best_effort_sharding` on the current mesh;
            an empty mapping replicates.
        dtype: type that floating-point parameters are cast to; default: the plan's, else the stored type of each array.
        config: a Levanter model configuration; default: the one that the checkpoint's config.json describes.
        budget: most host memory to use beyond the arrays themselves, bytes.
        checksum: compare the files with the checksums that their store recorded, if it recorded any.

    Returns:
        The Levanter model (an `LmHeadModel`), its arrays sharded over the plan's mesh or the current one.

    Raises:
        ConfigError: there is no such checkpoint, no mesh, or the plan is for another model.
        CheckpointError: the checkpoint does not match the model, or is damaged.
    """
    if not isinstance(plan, Plan | None):
        raise ConfigError(f"load_pretrained: plan is {plan!r}, not a Plan; read a file with Plan.load(path)")
    if plan is not None and axis_mapping is not None:
        raise ConfigError("load_pretrained takes a plan or an axis_mapping, not both")
    check_argument("load_pretrained", "ref", ref, (str, RepoRef, os.PathLike), "a folder, org/model@revision or a URL")
    folder = open_folder(str(ref))
    own_class = None if config is None else own_class_name(type(config))
    template = _make_template(read_config(None, folder, own_class), config)
    if plan is not None:
        _check_plan(plan, template)
    mesh = make_mesh(plan) if plan is not None else _current_mesh()
    mapping = plan.param_mapping if plan is not None else _mapping_or_current(axis_mapping)
    if dtype is None and plan is not None:
        dtype = plan.workload.param_dtype
    model, _ = stream_checkpoint(template, folder, mesh, mapping, dtype, budget, checksum)
    return model


class HFCheckpointConverter(LevanterConverter):
    """Levanter's converter with `load_pretrained` replaced: change the import, keep the script."""

    def load_pretrained(
        self,
        lm_model_cls: Any,
        ref: Any = None,
        config: Any = None,
        axis_mapping: ResourceMapping | None = None,
        resize_vocab_to_match_tokenizer: bool = RESIZES_VOCAB,
        dtype: Any = None,
    ) -> Any:
        """Stream a checkpoint into the shardings of `axis_mapping` (default: the current one, else best effort).

        Signature and result are those of Levanter's method.
        """
        del lm_model_cls  # Levanter ignores it too: the configuration names the class
        folder = open_folder(str(ref or self.reference_checkpoint))
        hf_config = read_config(None, folder, own_class_name(self.LevConfigClass))
        template = _make_template(hf_config, config if config is not None else _custom_config(self, hf_config))
        mapping = _mapping_or_current(axis_mapping)
        model, _ = stream_checkpoint(template, folder, _current_mesh(), mapping, dtype)
        if resize_vocab_to_match_tokenizer and model.Vocab.size != self.Vocab.size:
            resize = hax.named_jit(lambda m: m.resize_vocab(self.Vocab.size), axis_resources=mapping)
            model = resize(model)
        return model


def _custom_config(converter: Any, hf_config: dict[str, Any]) -> Any:
    """Return the configuration of a user's own class; None if the class is Levanter's for the model type.

    `build_model` makes the latter from config.json, and corrects what Levanter reads differently.
    """
    model_type = hf_config["model_type"]
    if model_type in SUPPORTED_MODELS and converter.LevConfigClass is levanter_config_class(model_type):
        return None
    values = {key: value for key, value in hf_config.items() if key != CLASS_KEY}
    return converter.config_from_hf_config(converter.HfConfigClass(**values))


def _make_template(hf_config: dict[str, Any], config: Any) -> Any:
    """Make the model without weights, of a Levanter configuration, or of config.json if `config` is None."""
    if config is None:
        return build_model(hf_config, position=1).template
    size = getattr(transformers_config(hf_config), "vocab_size", None)
    if type(size) is not int or size < 1:
        raise ConfigError(f"config.json: vocab_size is {size!r}; it must be a positive integer")
    return abstract_module(config, hax.Axis("vocab", size))


def _check_plan(plan: Plan, template: Any) -> None:
    """Check that every array of the model `template` has the axes that `plan` was made for.

    Raises:
        ConfigError: one has not.
    """
    planned = {parameter.path: parameter.axes for parameter in plan.parameters}
    for own in parameters_of(template):
        if planned.get(own.path) != own.axes:
            raise ConfigError(
                f"the plan is for {plan.model.name}, whose {own.path} is {planned.get(own.path)}; here it is "
                f"{own.axes}; plan again"
            )


def _mapping_or_current(axis_mapping: ResourceMapping | None) -> ResourceMapping | None:
    """Return `axis_mapping`; if it is None, the current `hax.axis_mapping`, or None if there is none either."""
    # an empty mapping replicates everything: it does not mean the current one
    return current_thread_local_mapping() if axis_mapping is None else axis_mapping


def _current_mesh() -> Mesh:
    """Return the mesh that `jax.set_mesh` or `hax.partitioning.set_mesh` made current.

    Raises:
        ConfigError: there is none.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ConfigError("load_pretrained needs a mesh: pass plan=, or call it inside hax.partitioning.set_mesh(mesh)")
    return mesh


def stream_checkpoint(
    template: Any,
    folder: Folder,
    mesh: Mesh,
    mapping: ResourceMapping | None,
    dtype: Any,
    budget: int = DEFAULT_BUDGET,
    checksum: bool = False,
    deadline_s: float = DEADLINE_S,
) -> tuple[Any, StateDictProgram]:
    """Stream the checkpoint in `folder` into the model `template`.

    Args:
        template: a Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        mapping: logical axis -> mesh axes; None for `best_effort_sharding`.
        dtype: type that floating-point parameters are cast to; None for the stored type of each array.
        budget: most host memory to use beyond the arrays, bytes.
        checksum: compare the files with the checksums that their store recorded, if it recorded any.
        deadline_s: most seconds without progress.

    Returns:
        The model with its arrays, and the program that maps the checkpoint's tensors to them.

    Raises:
        CheckpointError: the checkpoint does not match the model, or is damaged.
    """
    if checksum:
        folder = CheckedFolder(folder)
    with open_process_group() as processes:

        def inspect() -> tuple[dict[str, Tensor], StateDictProgram]:
            # the checksums of files are asked for in every process
            tensors = read_index(folder) if checksum else read_shared_index(folder, processes)
            return tensors, match_tensors(template, tensors, folder.ref)

        tensors, program = processes.agree("checkpoint", inspect, _file_versions)
        specs = _best_effort_specs(mesh, program) if mapping is None else array_specs(template, mapping, program)
        dtypes = _array_dtypes(program, tensors, dtype)
        arrays = stream_arrays(program.views, tensors, mesh, specs, dtypes, processes, budget, deadline_s=deadline_s)
        if checksum:
            check_files(tensors.values(), processes)

    def fill(path: tuple[Any, ...], leaf: Any) -> Any:
        array = arrays.get(jax.tree_util.keystr(path).lstrip("."))
        if array is None:
            return leaf
        return hax.NamedArray(array, leaf.axes) if isinstance(leaf, hax.NamedArray) else array

    model = jax.tree_util.tree_map_with_path(fill, template, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    return model, program


def match_tensors(template: Any, tensors: Mapping[str, Tensor], where: str) -> StateDictProgram:
    """Map the tensors of a checkpoint to the arrays of the model, and check that the two match.

    Args:
        where: name of the checkpoint, for messages.

    Raises:
        CheckpointError: the checkpoint does not match the model.
    """
    expected = expected_tensors(template)
    prefix = _find_prefix(tensors, expected)
    prefixed = {f"{prefix}.{name}" if prefix else name: shape for name, shape in expected.items()}
    program = trace_program(template, prefixed, prefix)
    if not program.tensors.keys() <= tensors.keys():
        program = _trace_stored_names(template, tensors, prefix) or program
    # where the output head is the embedding, some checkpoints hold a copy of it
    ignored = {"lm_head.weight"} if getattr(template, "lm_head", None) is None else set()
    check_tensors(tensors, program.tensors, where, ignored)
    return program


def _trace_stored_names(template: Any, tensors: Mapping[str, Tensor], prefix: str | None) -> StateDictProgram | None:
    """Trace the conversion of tensors by the names that they have; None if Levanter does not read these.

    A converter may read more names than those that it writes, such as those of older checkpoints.
    """
    try:
        program = trace_program(template, {name: tensor.shape for name, tensor in tensors.items()}, prefix)
    except (CheckpointError, TypeError, ValueError):  # of Haliax and JAX: tensors of other shapes
        return None
    if any(program.views[p.path].shape != tuple(p.axes.values()) for p in parameters_of(template)):
        return None
    read = {piece.tensor for view in program.views.values() for piece in view.pieces}
    return StateDictProgram({name: shape for name, shape in program.tensors.items() if name in read}, program.views)


def _file_versions(checkpoint: tuple[dict[str, Tensor], StateDictProgram]) -> dict[str, str]:
    """Return file of the checkpoint -> version of its content."""
    tensors, _ = checkpoint
    return {tensor.file_name: tensor.file.version for tensor in tensors.values()}


def _find_prefix(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> str | None:
    """Return what the checkpoint puts before every expected name, as "transformer" in GPT-2; None for nothing."""
    if expected.keys() <= tensors.keys():
        return None
    prefixes = Counter(
        name.removesuffix(f".{suffix}") for suffix in expected for name in tensors if name.endswith(f".{suffix}")
    )
    usual, count = prefixes.most_common(1)[0] if prefixes else (None, 0)
    # a prefix must match more of the tensors than no prefix does
    return usual if count > len(expected.keys() & tensors.keys()) else None


def array_specs(template: Any, mapping: ResourceMapping, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    """Return array path -> the mesh axes that shard each dimension, from the `mapping` of its logical axes."""
    axes = {path: leaf.axes for path, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray)}
    return {path: _mesh_axes(pspec_for_axis(axes.get(path, ()), mapping), view) for path, view in program.views.items()}


def _best_effort_specs(mesh: Mesh, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    return {path: _mesh_axes(best_effort_sharding(view.shape, mesh).spec, view) for path, view in program.views.items()}


def _mesh_axes(spec: PartitionSpec, view: View) -> tuple[MeshAxes, ...]:
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return (*axes, *[()] * (len(view.shape) - len(axes)))


def _array_dtypes(program: StateDictProgram, tensors: Mapping[str, Tensor], dtype: Any) -> dict[str, np.dtype]:
    """Return array path -> its type: `dtype`, or the stored type if that is None."""

    def array_dtype(path: str) -> np.dtype:
        """Return the type of one array; CheckpointError if its stored type is no floating-point type."""
        # the pieces of an array have one type in every checkpoint that transformers writes; otherwise take the widest
        kinds = {tensors[piece.tensor].dtype for piece in program.views[path].pieces}
        stored = functools.reduce(jnp.promote_types, sorted(kinds, key=str))
        if not jnp.issubdtype(stored, jnp.floating):
            name = program.views[path].pieces[0].tensor
            raise CheckpointError(f"{name} is stored as {stored}, the model has a floating-point parameter there")
        # without 64-bit mode JAX represents float64 as float32
        return np.dtype(dtype if dtype is not None else jax.dtypes.canonicalize_dtype(stored))

    return {path: array_dtype(path) for path in program.views}
