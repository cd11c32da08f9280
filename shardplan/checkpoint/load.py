"""Load a Hugging Face checkpoint into a sharded Levanter model."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping, current_thread_local_mapping, pspec_for_axis
from jax.sharding import Mesh, PartitionSpec
from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from transformers import AutoConfig

from shardplan.checkpoint.best_effort import best_effort_sharding
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import check_tensors, read_index
from shardplan.checkpoint.format.integrity import CheckedFolder, check_files
from shardplan.checkpoint.mapping.program import StateDictProgram, expected_tensors, trace_program
from shardplan.checkpoint.mapping.views import View
from shardplan.checkpoint.transfer.stream import BUDGET, stream_arrays
from shardplan.errors import CheckpointError, ConfigError
from shardplan.hardware import parse_slice
from shardplan.model import SUPPORTED, build_model, read_config
from shardplan.model.axes import named_leaves
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.plan import Plan
from shardplan.runtime.devices import make_mesh
from shardplan.runtime.process_group import watched
from shardplan.storage import Folder, open_folder


def load_pretrained(
    converter_or_config: Any,
    ref: str | None = None,
    *,
    plan: Plan | None = None,
    axis_mapping: ResourceMapping | None = None,
    dtype: Any = None,
    budget: int = BUDGET,
    checksum: bool = False,
) -> Any:
    """Stream the checkpoint `ref` into a Levanter model, every array straight into its sharding.

    Args:
        converter_or_config: a Levanter `HFCheckpointConverter`, or a Levanter model configuration, or None to take the
            configuration from the checkpoint's config.json.
        ref: local folder, org/model@revision, or a gs://, s3://, az://, http(s):// folder; default: the converter's
            reference checkpoint.
        plan: gives the mesh and the sharding of every parameter.
        axis_mapping: logical axis -> mesh axes, where there is no plan; default: the current `hax.axis_mapping`. With
            neither, every array gets `best_effort_sharding`.
        dtype: type that floating-point parameters are cast to; default: the plan's, else the checkpoint's.
        budget: most host memory to use beside the model, bytes.
        checksum: compare the files with the checksums that their store has on record, where it has any.

    Returns:
        The Levanter model (an `LmHeadModel`), its arrays sharded over the plan's mesh or the current one.

    Raises:
        ConfigError: there is no such checkpoint, or no mesh.
        CheckpointError: the checkpoint does not hold the model, or is damaged.
    """
    if plan is not None and axis_mapping is not None:
        raise ConfigError("load_pretrained takes a plan or an axis_mapping, not both")
    if isinstance(converter_or_config, LevanterConverter):
        ref = str(ref or converter_or_config.reference_checkpoint)
    if ref is None:
        raise ConfigError("load_pretrained needs the ref of a checkpoint")
    folder = open_folder(str(ref))
    template = _template(converter_or_config, read_config(None, folder))
    mesh = make_mesh(parse_slice(plan.hardware.slice), plan.mesh) if plan is not None else current_mesh()
    mapping = plan.param_mapping if plan is not None else _current(axis_mapping)
    if dtype is None and plan is not None:
        dtype = plan.workload.param_dtype
    return stream_model(template, folder, mesh, mapping, dtype, budget, checksum)


def _template(converter_or_config: Any, hf_config: dict[str, Any]) -> Any:
    """The model without weights, of the class that the converter or configuration asks for."""
    config = converter_or_config
    if isinstance(config, LevanterConverter):
        if config.LevConfigClass.__name__ == SUPPORTED.get(hf_config["model_type"], ("", ""))[1]:
            config = None  # the class that the model type stands for: read as everywhere else, corrections included
        else:
            config = config.config_from_hf_config(config.HfConfigClass(**hf_config))
    if config is None:
        return build_model(hf_config, position=1).template
    vocab = hax.Axis("vocab", AutoConfig.for_model(**hf_config).vocab_size)
    return eqx.filter_eval_shape(config.model_type.init, vocab, config, key=jax.random.PRNGKey(0))


def stream_model(
    template: Any,
    folder: Folder,
    mesh: Mesh,
    mapping: ResourceMapping | None,
    dtype: Any,
    budget: int = BUDGET,
    checksum: bool = False,
) -> Any:
    """The model `template` with its arrays read from `folder`; see `load_pretrained`.

    Args:
        template: a Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        mapping: logical axis -> mesh axes; None for best effort.
        budget: host memory to use beside the arrays, bytes.
        checksum: compare the files with what their store has on record.
    """
    return stream_checkpoint(template, folder, mesh, mapping, dtype, budget, checksum)[0]


def stream_checkpoint(
    template: Any,
    folder: Folder,
    mesh: Mesh,
    mapping: ResourceMapping | None,
    dtype: Any,
    budget: int,
    checksum: bool,
) -> tuple[Any, StateDictProgram]:
    """What `stream_model` gives, and how it was made of the checkpoint's tensors."""
    if checksum:
        folder = CheckedFolder(folder)
    with watched() as processes:
        tensors, program = processes.agree("checkpoint", lambda: validated(template, folder), _versions)
        specs = _best_effort_specs(mesh, program) if mapping is None else array_specs(template, mapping, program)
        dtypes = _dtypes(program, tensors, dtype)
        arrays = stream_arrays(program.views, tensors, mesh, specs, dtypes, processes, budget)
        if checksum:
            check_files(tensors.values(), processes)

    def fill(path: tuple[Any, ...], leaf: Any) -> Any:
        array = arrays.get(jax.tree_util.keystr(path).lstrip("."))
        if array is None:
            return leaf
        return hax.NamedArray(array, leaf.axes) if isinstance(leaf, hax.NamedArray) else array

    model = jax.tree_util.tree_map_with_path(fill, template, is_leaf=lambda node: isinstance(node, hax.NamedArray))
    return model, program


def validated(template: Any, folder: Folder) -> tuple[dict[str, Tensor], StateDictProgram]:
    """The tensors in `folder`, and how the model is made of them, once they are known to be all there."""
    tensors = read_index(folder)
    expected = expected_tensors(template)
    program = trace_program(template, _prefix(tensors, expected), expected)
    # where the output head is the embedding, some checkpoints hold a copy of it
    ignored = {"lm_head.weight"} if getattr(template, "lm_head", None) is None else set()
    check_tensors(tensors, program.tensors, folder.ref, ignored)
    return tensors, program


def _versions(found: tuple[dict[str, Tensor], StateDictProgram]) -> dict[str, str]:
    """File of the checkpoint -> what tells its content."""
    return {tensor.file.name.rpartition("/")[2]: tensor.file.version for tensor in found[0].values()}


class HFCheckpointConverter(LevanterConverter):
    """Levanter's converter with `load_pretrained` replaced: change the import, keep the script."""

    def load_pretrained(
        self,
        lm_model_cls: Any,
        ref: Any = None,
        config: Any = None,
        axis_mapping: ResourceMapping | None = None,
        resize_vocab_to_match_tokenizer: bool = True,
        dtype: Any = None,
    ) -> Any:
        """As Levanter's, streamed into the shardings of `axis_mapping` (default: the current one, else best effort)."""
        del lm_model_cls  # Levanter ignores it too: the configuration names the class
        if config is None:
            model = load_pretrained(self, ref, axis_mapping=axis_mapping, dtype=dtype)
        else:
            model = load_pretrained(
                config, str(ref or self.reference_checkpoint), axis_mapping=axis_mapping, dtype=dtype
            )
        if resize_vocab_to_match_tokenizer and model.Vocab.size != self.Vocab.size:
            resize = hax.named_jit(lambda m: m.resize_vocab(self.Vocab.size), axis_resources=_current(axis_mapping))
            model = resize(model)
        return model


def _current(axis_mapping: ResourceMapping | None) -> ResourceMapping | None:
    # an empty mapping replicates everything: it is not the absence of one
    return current_thread_local_mapping() if axis_mapping is None else axis_mapping


def current_mesh() -> Mesh:
    """The mesh that `jax.set_mesh` or `hax.partitioning.set_mesh` made current.

    Raises:
        ConfigError: there is none.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ConfigError("load_pretrained needs a mesh: pass plan=, or call it inside hax.partitioning.set_mesh(mesh)")
    return mesh


def _prefix(found: Mapping[str, Tensor], expected: Mapping[str, Any]) -> str | None:
    """What the checkpoint puts before every expected name, as "transformer" in GPT-2's; None for nothing."""
    if expected.keys() <= found.keys():
        return None
    prefixes = Counter(
        name.removesuffix(f".{wanted}") for wanted in expected for name in found if name.endswith(f".{wanted}")
    )
    usual, count = prefixes.most_common(1)[0] if prefixes else (None, 0)
    # a prefix must serve more of the tensors than no prefix does
    return usual if count > len(expected.keys() & found.keys()) else None


def array_specs(template: Any, mapping: ResourceMapping, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    """Array path -> the mesh axes that cut each dimension, as `mapping` says of its logical axes."""
    axes = {path: leaf.axes for path, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray)}
    return {path: _cuts(pspec_for_axis(axes.get(path, ()), mapping), view) for path, view in program.views.items()}


def _best_effort_specs(mesh: Mesh, program: StateDictProgram) -> dict[str, tuple[MeshAxes, ...]]:
    return {path: _cuts(best_effort_sharding(view.shape, mesh).spec, view) for path, view in program.views.items()}


def _cuts(spec: PartitionSpec, view: View) -> tuple[MeshAxes, ...]:
    cuts = [(cut,) if isinstance(cut, str) else tuple(cut or ()) for cut in spec]
    return (*cuts, *[()] * (len(view.shape) - len(cuts)))


def _dtypes(program: StateDictProgram, tensors: Mapping[str, Tensor], wanted: Any) -> dict[str, np.dtype]:
    """Array path -> its type."""

    def dtype(path: str) -> np.dtype:
        # the pieces of one array have one type in every checkpoint that transformers writes; where not, the widest
        kinds = {tensors[piece.tensor].dtype for piece in program.views[path].pieces}
        stored = functools.reduce(jnp.promote_types, kinds)
        if not jnp.issubdtype(stored, jnp.floating):
            name = program.views[path].pieces[0].tensor
            raise CheckpointError(f"{name} is stored as {stored}, the model has a floating-point parameter there")
        # without 64-bit mode JAX holds float64 as float32
        return np.dtype(wanted if wanted is not None else jax.dtypes.canonicalize_dtype(stored))

    return {path: dtype(path) for path in program.views}
