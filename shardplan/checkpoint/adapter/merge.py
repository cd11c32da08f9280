"""Finds the tensors of a checkpoint that an adapter changes, and checks that the adapter belongs to the model.

Shapes alone do not show it: an adapter of a model with fewer layers fits the first layers of a model with more. So
every tensor of the adapter must have a place in the model, and every module that its configuration names its tensors.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardplan.checkpoint.adapter.adapted_tensor import AdaptedTensor, Digits, adapt_tensor, find_digits
from shardplan.checkpoint.adapter.adapter import Adapter, MatrixPair
from shardplan.checkpoint.adapter.adapter_config import ALL_LINEAR, REMEDY, BiasKind
from shardplan.checkpoint.adapter.factors import Factors
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.names import HEADS, StoredNames, find_stored_names
from shardplan.checkpoint.mapping.unneeded import NUMBER, kinds_text
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, ConfigError

EXPERTS = ".experts."
"""Part of the names of routed experts, which are linear layers only in versions of transformers before 5."""


@dataclass(frozen=True)
class _Shaped:
    """A stand-in for a tensor of the adapted model that has only a shape."""

    shape: Shape


@dataclass(frozen=True)
class AdapterChanges:
    """The tensors that replace tensors of the checkpoint, by name."""

    adapted: Mapping[str, AdaptedTensor]
    """Name -> matrix with its change by the adapter; the base matrix may be one that the adapter saves whole."""
    saved: Mapping[str, Tensor]
    """Name -> tensor that the adapter saves whole; may include an output head that a tied checkpoint does not have."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor, for adapted tensors and for tensors that the adapter saves in full."""
        return {**self.saved, **self.adapted}


def merge_adapter(
    adapter: Adapter,
    tensors: Mapping[str, Tensor],
    stored: StoredNames,
    expected: Mapping[str, Shape],
    where: str,
    stores_inputs_first: bool,
) -> AdapterChanges:
    """Find the tensors of a checkpoint that an adapter changes.

    Args:
        tensors: tensors of the checkpoint, by name.
        stored: where the checkpoint has the tensors that the model expects.
        expected: name -> shape of the tensors of the model.
        where: name of the checkpoint, for messages.
        stores_inputs_first: whether the linear layers of the model are stored as {inputs, outputs}.

    Raises:
        CheckpointError: the adapter is for another model, or incomplete.
        ConfigError: the adapter's configuration contradicts the model.
    """
    if adapter.config.is_transposed and not stores_inputs_first:
        raise ConfigError(
            f"{adapter.config.where}: fan_in_fan_out is true, and this model stores linear layers as outputs x inputs, "
            "unlike GPT-2; set it to false if the adapter is for this model"
        )
    factors = {
        name: _factors(adapter, name, pair, pair.is_embedding or (stores_inputs_first and not _is_head(name)))
        for name, pair in adapter.pairs.items()
    }
    shaped = {name: _Shaped(each.shape) for name, each in factors.items()}
    shaped |= {name: _Shaped(tensor.shape) for name, tensor in adapter.saved.items()}
    names = find_stored_names(expected, shaped, adapter.where)
    own_names = _own_names(adapter, names, stored, where)
    _check_complete(adapter, names, expected)
    saved: dict[str, Tensor] = {}
    for name, tensor in adapter.saved.items():
        own = own_names[name]
        _check_shape(adapter, name, tensor.shape, tensors.get(own, tensor).shape, where, own)
        saved[own] = tensor
    adapted: dict[str, AdaptedTensor] = {}
    known_digits: dict[tuple[Shape, Shape], Digits] = {}
    for name, each in factors.items():
        own = own_names[name]
        base = saved.get(own) or tensors[own]
        _check_shape(adapter, name, each.shape, base.shape, where, own)
        adapted[own] = adapt_tensor(base, each, _digits(base, known_digits))
    return AdapterChanges(adapted, saved)


def _factors(adapter: Adapter, name: str, pair: MatrixPair, is_transposed: bool) -> Factors:
    scaling = adapter.config.scaling_of(name.removesuffix(".weight"))
    return Factors(name, pair.a, pair.b, pair.a_name, pair.b_name, scaling, is_transposed, adapter.cache)


def _is_head(name: str) -> bool:
    return f"{name.split('.')[-2]}." in HEADS


def _own_names(adapter: Adapter, names: StoredNames, stored: StoredNames, where: str) -> dict[str, str]:
    """Return name in the adapter -> name in the checkpoint.

    Raises:
        CheckpointError: the checkpoint has no such tensor.
    """
    by_canonical = {canonical: own for own, canonical in stored.canonical.items()}
    head = f"{stored.head_module}.weight"
    found, unknown = {}, []
    for name, canonical in names.canonical.items():
        own = by_canonical.get(canonical)
        if own is None and _is_head(name) and name in adapter.saved and canonical.endswith(".weight"):
            own = head  # of a tied model, which was saved apart from the embedding
        if own is None:
            unknown.append(name)
        else:
            found[name] = own
    if unknown:
        raise CheckpointError(
            f"{adapter.where} is not an adapter of this model: {where} has no {kinds_text(sorted(unknown))}; name the "
            "adapter's own base model as model.ref"
        )
    return found


def _check_shape(adapter: Adapter, name: str, shape: Shape, expected: Shape, where: str, own: str) -> None:
    if shape != expected:
        is_longer = name in adapter.saved and len(shape) == 2 and shape[1:] == expected[1:]
        vocabulary = "; a vocabulary that was resized is not supported" if is_longer else ""
        raise CheckpointError(
            f"{adapter.where} is not an adapter of this model: its change of {name} has the shape {list(shape)}, and "
            f"{own} of {where} {list(expected)}{vocabulary}"
        )


def _check_complete(adapter: Adapter, names: StoredNames, expected: Mapping[str, Shape]) -> None:
    """Check that the adapter has every tensor that was trained according to adapter_config.json.

    Raises:
        CheckpointError: tensors are missing.
    """
    config = adapter.config
    adapted = {names.canonical[name] for name in adapter.pairs}
    saved = {names.canonical[name] for name in adapter.saved}
    for entry in config.saved_modules:
        if not any(_is_within(name, entry) for name in adapter.saved):
            raise CheckpointError(
                f"{adapter.where} has no tensor of {entry}, which modules_to_save lists; download it again"
            )
    missing, untrained = [], []
    for name, shape in expected.items():
        module, _, parameter = names.prefixed[name].rpartition(".")
        if parameter == "weight" and len(shape) == 2 and name not in adapted and config.is_target(module):
            untrained.append(name)
        has_bias = config.bias is BiasKind.ALL or (
            config.bias is BiasKind.ADAPTED and f"{name.rpartition('.')[0]}.weight" in adapted
        )
        if name not in saved and (config.is_saved(module) or (parameter == "bias" and has_bias)):
            missing.append(name)
    kinds = _kinds(adapted)
    for name in untrained:
        is_optional = config.targets == ALL_LINEAR or EXPERTS in name
        if NUMBER.sub("N", name) in kinds or not is_optional:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{adapter.where} lacks what its adapter_config.json says was trained ({kinds_text(sorted(missing))}); it "
            "is incomplete, or an adapter of another model"
        )


def _is_within(name: str, entry: str) -> bool:
    """Return whether a parameter is in a module whose name ends with an entry of `modules_to_save`."""
    return any(module.endswith(entry) for module in _modules_around(name))


def _modules_around(name: str) -> list[str]:
    """Return the module of a parameter and all modules around it.

    >>> _modules_around("model.norm.weight")
    ['model', 'model.norm']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _kinds(names: Iterable[str]) -> set[str]:
    return {NUMBER.sub("N", name) for name in names}


def _digits(base: Tensor, known: dict[tuple[Shape, Shape], Digits]) -> Digits | None:
    """Return `find_digits` of a matrix; None if its values are in the order of its codes.

    Args:
        known: cache of results by dimensions; all matrices of a checkpoint have their codes in one order.
    """
    layout = base.view("") if isinstance(base, ComputedTensor) else None
    if layout is None or not isinstance(base, ComputedTensor):
        return None
    key = (base.dims, base.shape)
    if key not in known:
        known[key] = find_digits(layout, base.dims)
    return known[key]


def check_tied(
    changes: AdapterChanges, adapter: Adapter, embedding: str | None, head: str, has_head: bool, where: str
) -> None:
    """Refuse an adapter that is ambiguous because the model's output head is its embedding.

    PEFT changes only one of the two while a model runs, but both when it merges the adapter.

    >>> from types import SimpleNamespace
    >>> changes, adapter = AdapterChanges({"wte.weight": None}, {}), SimpleNamespace(where="org/adapter")
    >>> check_tied(changes, adapter, "wte.weight", "lm_head.weight", False, "gpt2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.CheckpointError: org/adapter changes wte.weight, and gpt2 has one matrix as embedding and ...

    Args:
        embedding, head: names of the embedding and the head in the checkpoint.
        has_head: whether the checkpoint holds a copy of the embedding as its head.

    Raises:
        CheckpointError: the adapter changes only one of the two.
    """
    low_rank = [name for name in (embedding, head) if name in changes.adapted]
    is_alone = embedding in changes.saved and head not in changes.saved
    if low_rank or (is_alone and (has_head or not adapter.config.ties_embeddings)):
        changed = low_rank[0] if low_rank else embedding
        raise CheckpointError(
            f"{adapter.where} changes {changed}, and {where} has one matrix as embedding and output head: PEFT changes "
            f"one of both while the model runs, and both when it merges; {REMEDY}"
        )


def unused_changes(changes: AdapterChanges, read: Collection[str], where: str) -> list[str]:
    """List the tensors that an adapter changes but the model never reads, such as tensors of a vision tower.

    >>> changes = AdapterChanges({}, {"norm.weight": None, "vision.proj.weight": None})
    >>> unused_changes(changes, ["norm.weight"], "adapter")
    ['the adapter changes tensors that the model has no use for (vision.proj.weight)']

    Args:
        read: names of the tensors that are read, or compared.
        where: name of the checkpoint, for messages.

    Raises:
        CheckpointError: the model reads none of the changed tensors.
    """
    unused = sorted(name for name in changes.tensors if name not in read)
    if not unused:
        return []
    text = f"the adapter changes tensors that the model has no use for ({kinds_text(unused)})"
    if len(unused) == len(changes.tensors):
        raise CheckpointError(f"{where}: {text}, and nothing else; leave model.adapter out")
    return [text]


def check_changes(adapted: Collection[AdaptedTensor], where: str) -> None:
    """Check that an adapter changes at least one weight; reads its matrices up to the first one that is not zero.

    Raises:
        CheckpointError: all changes are zero, or matrices are damaged.
    """
    if adapted and all(tensor.factors.changes_nothing() for tensor in adapted):
        name = next(iter(adapted)).factors.b.file.name
        raise CheckpointError(
            f"{name}: it changes nothing of {where}, because of every two matrices one is zero, as before training; "
            "leave model.adapter out, or name an adapter that was trained"
        )
