"""Matches the tensors of a checkpoint with the arrays of a model: names, shapes, and tensors that only one side has."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardplan.checkpoint.adapter.adapted_tensor import AdaptedTensor
from shardplan.checkpoint.adapter.adapter import Adapter
from shardplan.checkpoint.adapter.merge import AdapterChanges, check_changes, check_tied, merge_adapter, unused_changes
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.codecs.decode_index import decode_index
from shardplan.checkpoint.format.compare import hold_the_same
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import INDEX, SINGLE, TensorIndex, check_tensors, missing_files_text
from shardplan.checkpoint.mapping.names import HEADS, StoredNames, find_stored_names
from shardplan.checkpoint.mapping.state_dict_program import (
    StateDictProgram,
    dispensable_tensors,
    expected_tensors,
    stores_inputs_first,
    trace_program,
)
from shardplan.checkpoint.mapping.unneeded import kinds_text
from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import Quantization
from shardplan.model.inspect import named_leaves, parameters_of
from shardplan.runtime.garbage import without_garbage_collection


@dataclass(frozen=True)
class Match:
    """The mapping from the tensors of a checkpoint to the arrays of a model."""

    where: str
    """Name of the checkpoint, for messages."""
    program: StateDictProgram
    """Checkpoint tensors by name, and the arrays that they make up."""
    head: tuple[str, str] | None = None
    """Names of an output head that the model lacks, and of the embedding that it must be equal to."""
    unneeded: tuple[str, ...] = ()
    """Names of tensors that the model has no use for."""
    second_set: tuple[tuple[Tensor, Tensor], ...] = ()
    """Pairs of a tensor to read and its copy in a second complete set of weights; both must be equal."""
    rivals: tuple[tuple[str, Tensor], ...] = ()
    """Name and tensor of further copies of tensors to read, in files outside of the index; all must be equal."""
    notes: tuple[str, ...] = ()
    """Mistakes in the index."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> tensor of the checkpoint; coded tensors have the names of weights, adapted ones include the changes."""
    adapted: tuple[AdaptedTensor, ...] = ()
    """Adapted tensors of which at least one change must not be zero; empty if the adapter saves other tensors whole."""

    @property
    def needs_values(self) -> bool:
        """Whether `check_values` must compare values before the tensors are read."""
        return bool(self.head or self.second_set or self.rivals or self.adapted)


@without_garbage_collection()
def match_checkpoint(
    template: Any,
    index: TensorIndex,
    where: str,
    quantization: Quantization | None = None,
    adapter: Adapter | None = None,
) -> Match:
    """Match the tensors of a checkpoint with the arrays of the model.

    >>> import haliax as hax
    >>> import jax
    >>> import numpy as np
    >>> axes = hax.Axis("vocab", 16), hax.Axis("embed", 8)
    >>> wte = hax.nn.Embedding(hax.NamedArray(jax.ShapeDtypeStruct((16, 8), np.float32), axes), *axes)
    >>> tensor = Tensor(None, 0, (16, 8), np.dtype(np.float32), SINGLE)
    >>> stored = {"transformer.wte.weight": tensor, "vision.bias": tensor}
    >>> match = match_checkpoint({"wte": wte}, TensorIndex(stored), "here")
    >>> match.program.tensors, match.unneeded
    ({'transformer.wte.weight': (16, 8)}, ('vision.bias',))

    Args:
        template: a Levanter model with `jax.ShapeDtypeStruct`s in place of arrays.
        where: name of the checkpoint, for messages.
        quantization: how its config.json says that weights are stored; None for plain numbers.
        adapter: adapter that changes tensors of the checkpoint.

    Raises:
        CheckpointError: the checkpoint does not match the model, or the adapter is for another model.
    """
    expected = expected_tensors(template)
    base, not_read = decode_index(index, quantization, where)
    index = base
    tensors = _without_second_set(expected, base, where)
    stored = find_stored_names(expected, tensors, where)
    changes = AdapterChanges({}, {})
    if adapter is not None:
        if base.missing_files and stored.names.keys() != expected.keys():  # or else the adapter would be blamed
            raise CheckpointError(missing_files_text(base, where))
        changes = merge_adapter(adapter, tensors, stored, expected, where, stores_inputs_first(template))
        tensors = {**tensors, **changes.tensors}
        stored = find_stored_names(expected, tensors, where)
        index = replace(base, tensors={**base.tensors, **changes.tensors})
    program = trace_program(template, expected, stored=_coded_views(tensors, stored))
    head = None if any(name.startswith(HEADS) for name in expected) else stored.head
    tied = _tied_embedding(template, program)
    names = dict(stored.names)
    if adapter is not None and tied is not None:
        own_head = stored.head or f"{stored.head_module}.weight"
        check_tied(changes, adapter, names.get(tied), own_head, own_head in base.tensors, where)
    if head is not None and tied is not None and tied not in names and tensors[head].shape == expected[tied]:
        names[tied], head = head, None  # only the head was saved of what both are
    if names.keys() != expected.keys():
        other = _trace_stored_names(template, tensors, stored)
        program, names = (program, names) if other is None else other
    program = program.rename({**stored.prefixed, **names})
    missing = program.tensors.keys() - tensors.keys()
    if missing and index.missing_files:
        raise CheckpointError(missing_files_text(index, where))
    ignored = {head} if head is not None and tied in names else set()
    unneeded = check_tensors(
        tensors, program.tensors, where, ignored, {stored.head_module}, dispensable_tensors(template)
    )
    return Match(
        where,
        program,
        (head, names[tied]) if head is not None and tied in names else None,
        (*unneeded, *not_read),
        _second_set(expected, names, program, base, where),
        tuple((name, tensor) for name, tensor in base.rivals if name in program.tensors and name not in changes.saved),
        (*_index_notes(index, program), *unused_changes(changes, {*program.tensors, *ignored}, where)),
        index.tensors,
        () if changes.saved else tuple(changes.adapted.values()),
    )


def is_tied(template: Any) -> bool:
    """Return whether a Levanter model has no output head of its own, but could have one.

    >>> from types import SimpleNamespace
    >>> is_tied(SimpleNamespace(lm_head=None)), is_tied(SimpleNamespace())
    (True, False)
    """
    return hasattr(template, "lm_head") and template.lm_head is None


def _tied_embedding(template: Any, program: StateDictProgram) -> str | None:
    """Return the embedding's tensor if it is also the model's output head; None if the head is a separate tensor."""
    if not hasattr(template, "get_lm_head"):
        return None
    head = template.get_lm_head()
    path = next((path for path, leaf in named_leaves(template) if leaf is head), None)
    if path is None or program.views[path].piece_count != 1:
        return None
    (name,) = program.views[path].tensors
    return None if name.startswith(HEADS) else name


def check_values(match: Match, tensors: Mapping[str, Tensor], template: Any) -> list[str]:
    """Compare tensors that must have equal values; return warnings for the user.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.checkpoint.format.index import read_index
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/model.safetensors")
    ...     norm = read_index(open_folder(folder))["norm"]
    >>> check_values(Match("here", StateDictProgram({}, {}), second_set=((norm, norm),)), {}, template=None)
    ['here: model.safetensors and the files of model.safetensors.index.json hold the same weights; the latter are read']

    Args:
        template: the model that was matched.

    Raises:
        CheckpointError: two values differ.
    """
    if match.head is not None:
        head, embedding = match.head
        if not hold_the_same([(tensors[head], tensors[embedding])]):
            remedy = (
                'set "tie_word_embeddings": false in its config.json, and plan again'
                if is_tied(template)
                else f"Levanter's {type(template).__name__} can have no head of its own, so that it cannot be loaded"
            )
            raise CheckpointError(
                f"{match.where}: the output head {head} differs from the embedding {embedding}, and the model uses the "
                f"embedding for both; {remedy}"
            )
    for name, rival in match.rivals:
        if not hold_the_same([(tensors[name], rival)]):
            raise CheckpointError(
                f"{match.where}: {name} is in both {tensors[name].file_name} and {rival.file_name}, with other values, "
                f"and {INDEX} lists neither; remove the file that is not meant"
            )
    check_changes(match.adapted, match.where)
    if not match.second_set:
        return []
    if not hold_the_same(match.second_set):
        raise CheckpointError(
            f"{match.where} holds two complete sets of weights that differ: {SINGLE}, and the files of {INDEX}; remove "
            "the set that is not meant"
        )
    return [f"{match.where}: {SINGLE} and the files of {INDEX} hold the same weights; the latter are read"]


def _coded_views(tensors: Mapping[str, Tensor], stored: StoredNames) -> dict[str, View]:
    """Return name -> view of the codes, for coded tensors whose codes are in another order than the decoded values."""
    views = {}
    for own, name in stored.canonical.items():
        tensor = tensors[own]
        view = tensor.view(name) if isinstance(tensor, ComputedTensor) else None
        if view is not None:
            views[name] = view
    return views


def _trace_stored_names(
    template: Any, tensors: Mapping[str, Tensor], stored: StoredNames
) -> tuple[StateDictProgram, dict[str, str]] | None:
    """Trace the conversion of the stored tensor names; None if Levanter cannot read them.

    A converter may read names that it does not write, such as names of older checkpoints.

    Returns:
        The program, and name in it -> name in the checkpoint.
    """
    names = {canonical: own for own, canonical in stored.canonical.items()}
    try:
        shapes = {name: tensors[own].shape for name, own in names.items()}
        program = trace_program(template, shapes, stored=_coded_views(tensors, stored))
    except (CheckpointError, TypeError, ValueError):  # of Haliax and JAX: tensors of other shapes
        return None
    if any(program.views[p.path].shape != tuple(p.axes.values()) for p in parameters_of(template)):
        return None
    read: set[str] = set()
    for view in program.views.values():
        read.update(view.tensors)
    return StateDictProgram(
        {name: shape for name, shape in program.tensors.items() if name in read}, program.views
    ), names


def _without_second_set(expected: Mapping[str, Shape], index: TensorIndex, where: str) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint without `model.safetensors`, if other files hold all of them too."""
    others = {name: tensor for name, tensor in index.tensors.items() if tensor.file_name != SINGLE}
    sets = (index.single, others)
    if index.single and all(find_stored_names(expected, each, where).names.keys() == expected.keys() for each in sets):
        return others
    return index.tensors


def _second_set(
    expected: Mapping[str, Shape], names: Mapping[str, str], program: StateDictProgram, index: TensorIndex, where: str
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the index's tensors with their copies in `model.safetensors`, if each of the two sets is complete."""
    read = program.tensors.keys() & index.tensors.keys()  # an adapter may add an output head
    if not index.single or any(index.tensors[name].file_name == SINGLE for name in read):
        return ()
    second = find_stored_names(expected, index.single, where).names
    renamed = {own: second[name] for name, own in names.items() if name in second}
    pairs = []
    for name in sorted(read):
        other = index.single.get(renamed.get(name, name))
        if other is None:
            return ()
        pairs.append((index.tensors[name], other))
    return tuple(pairs)


def _index_notes(index: TensorIndex, program: StateDictProgram) -> list[str]:
    """Describe the disagreements of index and files about tensors that the model needs."""
    if index.is_stale:
        return [f"{INDEX} names files that do not exist, as that of an earlier save; {SINGLE} is complete, and is read"]
    notes = []
    unlisted = [name for name in program.tensors if not index.tensors[name].is_listed]
    if unlisted:
        files = sorted({index.tensors[name].file_name for name in unlisted})
        notes.append(f"{INDEX} does not say where {kinds_text(unlisted)} is; read from {', '.join(files)}")
    if index.missing_files:
        gone = ", ".join(index.missing_files)
        notes.append(f"{INDEX} names files that do not exist ({gone}); the model needs none of them")
    elif index.absent:
        notes.append(
            f"{INDEX} lists tensors that no file holds ({kinds_text(index.absent)}); the model needs none of them"
        )
    return notes
