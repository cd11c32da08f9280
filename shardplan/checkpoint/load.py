"""Load a Hugging Face checkpoint into a sharded Levanter model.

Three layers: `load_pretrained` and `HFCheckpointConverter` choose the model, mesh and mapping; `stream_checkpoint`
matches the model with the tensors of the checkpoint; `transfer.stream.stream_arrays` reads the arrays.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping, current_thread_local_mapping, pspec_for_axis
from jax.sharding import Mesh, PartitionSpec
from levanter.compat.hf_checkpoints import RepoRef

from shardplan.checkpoint.adapter.adapter import CACHE_PARTS, Adapter, read_adapter
from shardplan.checkpoint.best_effort import best_effort_sharding
from shardplan.checkpoint.format.casting import float_dtype
from shardplan.checkpoint.format.codecs.decode_index import quantization_of
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex, read_tensor_index
from shardplan.checkpoint.format.integrity import CheckedFolder, check_files
from shardplan.checkpoint.format.shared_index import read_shared_index
from shardplan.checkpoint.kept import with_kept_parts
from shardplan.checkpoint.levanter_converter.saving import SavingConverter
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram
from shardplan.checkpoint.mapping.unneeded import kinds_text
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.match import Match, check_values, is_tied, match_checkpoint
from shardplan.checkpoint.output_head import UNTIED, check_head, has_own_head
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.stream import DEFAULT_BUDGET, stream_arrays
from shardplan.decoder.architecture import Architecture
from shardplan.decoder.layers.sparse_layers import position_order
from shardplan.errors import CheckpointError, ConfigError, check_argument
from shardplan.execution.device_mesh import make_mesh
from shardplan.model.corrections.levanter_compat import has_windows
from shardplan.model.dtypes.parameter_dtypes import FLOAT32, float32_paths, kept_dtypes, unrounded_dtype
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves, parameters_of
from shardplan.model.model_class import CLASS_KEY, DECODER, LEVANTER, LEVANTER_CLASSES
from shardplan.model.registry import (
    abstract_module,
    build_model,
    name_of_class,
    transformers_config,
)
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.plan import Plan
from shardplan.runtime.processes.group import open_process_group
from shardplan.runtime.processes.watch.activity import DEADLINE_S
from shardplan.storage import Folder, open_adapter, open_folder
from shardplan.storage.contents import find_adapter

logger = logging.getLogger(__name__)


def load_pretrained(
    ref: str | RepoRef,
    *,
    plan: Plan | None = None,
    axis_mapping: ResourceMapping | None = None,
    dtype: Any = None,
    config: Any = None,
    budget: int = DEFAULT_BUDGET,
    checksum: bool = False,
    strict: bool = False,
    adapter: str | RepoRef | None = None,
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
        dtype: type that floating-point parameters are cast to, except that the decoder's routers become float32;
            default: the plan's, else the stored type of each array.
        config: a Levanter model configuration. By default it is made from the checkpoint's config.json, with the plan's
            class. Without a plan, it is Levanter's class for the model type, or shardplan's decoder for types and
            windows that Levanter does not support.
        budget: most host memory to use beyond the arrays themselves, bytes.
        checksum: compare the files with the checksums that their store recorded, if it recorded any.
        strict: refuse a checkpoint with tensors that the model has no use for, instead of a warning.
        adapter: repository or folder of a LoRA adapter that PEFT has saved; its change of the weights is added to them
            in float32 while they are read.

    Returns:
        The Levanter model (an `LmHeadModel`), its arrays sharded over the plan's mesh or the current one.

    Raises:
        ConfigError: the checkpoint or adapter does not exist, there is no mesh, the plan is for another model, or
            layers with Native Sparse Attention need another order of positions than the plan's.
        CheckpointError: the checkpoint or the adapter does not match the model, or is damaged.
    """
    if not isinstance(plan, Plan | None):
        raise ConfigError(f"load_pretrained: plan is {plan!r}, not a Plan; read a file with Plan.load(path)")
    if plan is not None and axis_mapping is not None:
        raise ConfigError("load_pretrained takes a plan or an axis_mapping, not both")
    check_argument("load_pretrained", "ref", ref, (str, RepoRef, os.PathLike), "a folder, org/model@revision or a URL")
    if adapter is not None:
        remedy = "a folder, org/adapter@revision or a URL"
        check_argument("load_pretrained", "adapter", adapter, (str, RepoRef, os.PathLike), remedy)
    dtype = _loadable_dtype(dtype)
    mesh = make_mesh(plan) if plan is not None else _current_mesh()
    folder, adapter_folder = open_folder(str(ref)), open_adapter(None if adapter is None else str(adapter))
    keeps_dtype = plan is not None and plan.model.kept_dtype is not None
    if config is not None:
        model_class: str | None = name_of_class(type(config))
    elif plan is not None:
        model_class = plan.model.class_name
    else:
        model_class = _class_without_plan(folder)
    template = _make_template(read_config(None, folder, model_class, keeps_dtype), config, folder, adapter_folder)
    if plan is not None:
        _check_plan(plan, template)
    mapping = plan.param_mapping if plan is not None else _mapping_or_current(axis_mapping)
    if dtype is None and plan is not None:
        dtype = plan.workload.param_dtype
    model, _ = stream_checkpoint(
        template, folder, mesh, mapping, dtype, budget, checksum, strict=strict, adapter=adapter_folder
    )
    return model


class HFCheckpointConverter(SavingConverter):
    """Drop-in replacement for Levanter's converter that loads and saves as shardplan does: change the import only."""

    def load_pretrained(
        self,
        lm_model_cls: Any,
        ref: Any = None,
        config: Any = None,
        axis_mapping: ResourceMapping | None = None,
        resize_vocab_to_match_tokenizer: bool = False,
        dtype: Any = None,
    ) -> Any:
        """Stream a checkpoint into the shardings of `axis_mapping` (default: the current mapping, else best effort).

        The signature and the result are the same as in Levanter's method.

        Raises:
            ConfigError: there is no such checkpoint; no checkpoint is named and the converter has none; or there is no
                mesh.
            CheckpointError: the checkpoint does not match the model, or is damaged.
        """
        del lm_model_cls  # Levanter ignores it too: the configuration names the class
        ref = ref or self.reference_checkpoint
        if ref is None:
            raise ConfigError(
                "load_pretrained: no checkpoint is named, and the converter has no reference_checkpoint; set "
                "model.reference_checkpoint, or name one in initialize_from_hf"
            )
        folder = open_folder(str(ref))
        hf_config = read_config(None, folder, name_of_class(_config_class(self)))
        config = config if config is not None else _custom_config(self, hf_config)
        template = _make_template(hf_config, config, folder)
        mapping = _mapping_or_current(axis_mapping)
        dtype = _loadable_dtype(dtype)
        model, _ = stream_checkpoint(template, folder, _current_mesh(), mapping, dtype)
        if resize_vocab_to_match_tokenizer and model.Vocab.size != self.Vocab.size:
            resize = hax.named_jit(lambda m: m.resize_vocab(self.Vocab.size), axis_resources=mapping)
            model = resize(model)
        return model


def _class_without_plan(folder: Folder) -> str | None:
    """Choose the class of a model that is loaded without a plan: Levanter's, or the decoder for models with windows.

    Levanter's models get their windows from the caller's mask; the decoder's layers have them built in.
    """
    hf_config = read_config(None, folder, LEVANTER)
    return None if has_windows(hf_config) else LEVANTER


def _loadable_dtype(dtype: Any) -> np.dtype | None:
    """Return the numpy type for a floating-point type that a caller gives, if JAX has it; None for None.

    Raises:
        ConfigError: the type is not a floating-point type, or JAX has it only with other settings.
    """
    result = float_dtype("load_pretrained", dtype)
    if result is not None and (canonical := jax.dtypes.canonicalize_dtype(result)) != result:
        raise ConfigError(
            f"load_pretrained: dtype is {result}, which JAX loads as {canonical}; ask for {canonical}, "
            "or set JAX_ENABLE_X64=1"
        )
    return result


def _config_class(converter: Any) -> type:
    """Return the class of a converter's Levanter configuration; a converter may hold the class or an instance."""
    given = converter.LevConfigClass
    return given if isinstance(given, type) else type(given)


def _custom_config(converter: Any, hf_config: dict[str, Any]) -> Any:
    """Return the configuration of a user's own model class; None for the decoder and for Levanter's own classes.

    For these two, `build_model` makes the configuration from config.json, and corrects what Levanter misreads.
    """
    if name_of_class(_config_class(converter)) in (DECODER, LEVANTER_CLASSES.get(hf_config["model_type"])):
        return None
    values = {key: value for key, value in hf_config.items() if key != CLASS_KEY}
    return converter.config_from_hf_config(converter.HfConfigClass(**values))


def _make_template(hf_config: dict[str, Any], config: Any, folder: Folder, adapter: Folder | None = None) -> Any:
    """Make the model without weights, from a Levanter configuration `config`, or from config.json if it is None.

    A model from config.json has a separate output head if the checkpoint in `folder`, or the adapter, holds one.
    """
    if config is None:
        template = build_model(hf_config, position=1).template
        if is_tied(template):
            with open_process_group() as processes:
                if has_own_head(template, folder, processes, adapter):
                    return build_model({**hf_config, **UNTIED}, position=1).template
        return template
    size = getattr(transformers_config(hf_config), "vocab_size", None)
    if type(size) is not int or size < 1:
        raise ConfigError(f"config.json: vocab_size is {size!r}; it must be a positive integer")
    return abstract_module(config, hax.Axis("vocab", size))


def _check_plan(plan: Plan, template: Any) -> None:
    """Check that the model `template` has the axes and the order of positions that `plan` was made for.

    Raises:
        ConfigError: an axis or the order differs.
    """
    check_head(plan, template)
    order = position_order(template.config.segments) if isinstance(template.config, Architecture) else None
    if order not in (None, plan.attention.layout):
        raise ConfigError(
            f"the plan has positions in {plan.attention.layout} order, and native sparse attention of this model takes "
            f"them in {order} order; pass config=specialize(model, plan).config, or plan with --pin "
            f"{plan.model.position}="
        )
    planned = {parameter.path: parameter.axes for parameter in plan.parameters}
    for own in parameters_of(template):
        if planned.get(own.path) != own.axes:
            raise ConfigError(
                f"the plan is for {plan.model.name}, whose {own.path} is {planned.get(own.path)}; here it is "
                f"{own.axes}; plan again"
            )


def _mapping_or_current(axis_mapping: ResourceMapping | None) -> ResourceMapping | None:
    """Return `axis_mapping`, or else the mapping of the enclosing `hax.axis_mapping`; None if there is neither."""
    # an empty mapping replicates everything: it does not mean the current one
    return current_thread_local_mapping() if axis_mapping is None else axis_mapping


def _current_mesh() -> Mesh:
    """Return the mesh that `jax.set_mesh` or `hax.partitioning.set_mesh` made current.

    Raises:
        ConfigError: there is no current mesh.
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
    strict: bool = False,
    is_copy: bool = False,
    adapter: Folder | None = None,
) -> tuple[Any, StateDictProgram]:
    """Stream the checkpoint in `folder` into the model `template`.

    Args:
        template: a Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        mapping: logical axis -> mesh axes; None for `best_effort_sharding`.
        dtype: type that floating-point parameters are cast to, or float32 where the model keeps it; None for the stored
            type of each array. Weights that the template keeps as stored are not cast.
        budget: most host memory to use beyond the arrays, bytes.
        checksum: compare the files with the checksums that their store recorded, if it recorded any.
        deadline_s: most seconds without progress.
        strict: refuse a checkpoint with tensors that the model has no use for.
        is_copy: whether the model is going to be written again. Parameters that it keeps in float32 are then cast to
            the narrowest type that holds both `dtype` and their stored type.
        adapter: the folder of an adapter, whose changes are added to the weights.

    Returns:
        The model with its arrays, and the program that maps the checkpoint's tensors to them.

    Raises:
        ConfigError: the adapter is of a kind that is not supported.
        CheckpointError: the checkpoint or the adapter does not match the model, or is damaged.
    """
    if checksum:
        folder, adapter = CheckedFolder(folder), None if adapter is None else CheckedFolder(adapter)
    cache_bytes = 0 if adapter is None else budget // CACHE_PARTS
    with open_process_group() as processes:

        def inspect() -> tuple[TensorIndex, Match, Adapter | None]:
            # the checksums of files are asked for in every process
            index = read_tensor_index(folder) if checksum else read_shared_index(folder, processes)
            read = None if adapter is None else read_adapter(adapter, cache_bytes)
            match = match_checkpoint(template, index, folder.ref, quantization_of(folder), read)
            if strict and match.unneeded:
                raise CheckpointError(f"{_unneeded_text(match)}; leave out load.strict to load it nevertheless")
            return index, match, read

        _, match, read_parts = processes.agree("checkpoint", inspect, _file_versions)
        tensors, program = match.tensors, match.program
        if match.needs_values:
            compared = processes.broadcast("values", lambda: check_values(match, tensors, template))
        else:
            compared = []
        if processes.process_index == 0:
            _warn(match, compared, folder, adapter)
        specs = _best_effort_specs(mesh, program) if mapping is None else array_specs(template, mapping, program)
        float32, kept = float32_paths(template), kept_dtypes(template)
        views, tensors = with_kept_parts(template, program.views, tensors, folder.ref)
        requests = {}
        for path, view in views.items():
            if path in kept:
                array_dtype = np.dtype(jnp.dtype(kept[path]))
            else:
                array_dtype = _array_dtype(view, tensors, dtype, path in float32, is_copy)
            requests[path] = ArrayRequest(view, specs[path], array_dtype)
        arrays = stream_arrays(requests, tensors, mesh, processes, budget - cache_bytes, deadline_s=deadline_s)
        if checksum:
            check_files([*tensors.values(), *(read_parts.stored if read_parts else ())], processes)

    def fill(path: tuple[Any, ...], leaf: Any) -> Any:
        array = arrays.get(jax.tree_util.keystr(path).lstrip("."))
        if array is None:
            return leaf
        return hax.NamedArray(array, leaf.axes) if isinstance(leaf, hax.NamedArray) else array

    model = jax.tree_util.tree_map_with_path(fill, template, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    return model, program


def _file_versions(checkpoint: tuple[TensorIndex, Match, Adapter | None]) -> dict[str, str]:
    """Return the version of the content of each file of the checkpoint and of the adapter."""
    index, _, adapter = checkpoint
    tensors = [*index.tensors.values(), *index.single.values()]
    return {tensor.file_name: tensor.file.version for tensor in tensors} | (adapter.versions if adapter else {})


def _warn(match: Match, compared: list[str], folder: Folder, adapter: Folder | None) -> None:
    """Log warnings: mistakes of the index, compared values, ignored tensors, and an adapter that is not applied.

    Args:
        compared: the results of comparing values.
    """
    for note in match.notes:
        logger.warning("%s: %s", match.where, note)
    for note in compared:
        logger.warning("%s", note)
    if match.unneeded:
        logger.warning("%s; ignored (load.strict refuses such a checkpoint)", _unneeded_text(match))
    found = find_adapter(folder)
    if found and adapter is None:
        logger.warning(
            "%s holds an adapter beside the model (%s), which is not applied; name its folder as model.adapter, if it "
            "is meant", match.where, found,
        )  # fmt: skip


def _unneeded_text(match: Match) -> str:
    count = len(match.unneeded)
    tensors = "a tensor" if count == 1 else f"{count} tensors"
    return f"{match.where} holds {tensors} that the model has no use for ({kinds_text(match.unneeded)})"


def array_specs(template: Any, mapping: ResourceMapping, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    """Return array path -> the mesh axes that shard each dimension, from the `mapping` of its logical axes.

    >>> axes = hax.Axis("embed", 8), hax.Axis("mlp", 16)
    >>> template = {"up_proj": hax.NamedArray(jax.ShapeDtypeStruct((8, 16), np.float32), axes)}
    >>> program = StateDictProgram({}, {"['up_proj']": View((8, 16))})
    >>> array_specs(template, {"embed": ("replica", "data"), "mlp": "model"}, program)
    {"['up_proj']": (('replica', 'data'), ('model',))}
    """
    axes = {path: leaf.axes for path, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray)}
    return {path: _mesh_axes(pspec_for_axis(axes.get(path, ()), mapping), view) for path, view in program.views.items()}


def _best_effort_specs(mesh: Mesh, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    return {path: _mesh_axes(best_effort_sharding(view.shape, mesh).spec, view) for path, view in program.views.items()}


def _mesh_axes(spec: PartitionSpec, view: View) -> tuple[MeshAxes, ...]:
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return (*axes, *[()] * (len(view.shape) - len(axes)))


def _array_dtype(view: View, tensors: Mapping[str, Tensor], dtype: Any, stays_float32: bool, is_copy: bool) -> np.dtype:
    """Return the type of an array: `dtype`, or its stored type if that is None; see `stream_checkpoint`.

    Args:
        stays_float32: whether the model keeps the parameter in float32.

    Raises:
        CheckpointError: the stored type is not a floating-point type.
    """
    # the pieces of an array have one type in every checkpoint that transformers writes; otherwise take the widest
    kinds = {tensors[name].value_dtype for name in view.tensors}
    stored = functools.reduce(jnp.promote_types, sorted(kinds, key=str))
    if not jnp.issubdtype(stored, jnp.floating):
        name = view.tensors[0]
        raise CheckpointError(f"{name} is stored as {stored}, the model has a floating-point parameter there")
    # without 64-bit mode JAX represents float64 as float32
    stored = jax.dtypes.canonicalize_dtype(stored)
    if dtype is None:
        return np.dtype(stored)
    if stays_float32:
        return unrounded_dtype(stored, dtype) if is_copy else np.dtype(FLOAT32)
    return np.dtype(dtype)
