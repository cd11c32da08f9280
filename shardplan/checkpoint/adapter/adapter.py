"""Reads an adapter as PEFT has saved it: its configuration, and the matrices that belong to each weight.

| tensors of a module, after `base_model.model.` | what they are |
|---|---|
| `lora_A.weight`, `lora_B.weight` | the matrices of a linear layer |
| `lora_embedding_A`, `lora_embedding_B` | the matrices of an embedding |
| any other parameter, also in `modules_to_save` or `base_layer` | a parameter that was saved whole |

The name of the adapter, `default`, may follow `lora_A` and its like, and `modules_to_save`.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
from msgspec.structs import replace

from shardplan.checkpoint.adapter.adapter_config import REMEDY, AdapterConfig, parse_adapter_config
from shardplan.checkpoint.adapter.factors import MatrixCache
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import MODEL_FILES, WeightFiles, read_index
from shardplan.errors import CheckpointError, ConfigError
from shardplan.storage import Folder, read_bytes
from shardplan.storage.contents import ADAPTER

CONFIG, SINGLE, PICKLE = ADAPTER
FILES = WeightFiles(SINGLE, f"{SINGLE}.index.json")
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the tensor names of the model that it adapts."""
PART_OF_RUN = "adapter/"
"""Prefix of an adapter's files where they are compared together with the checkpoint's files."""
MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.default)?(\.weight)?")
WHOLE = re.compile(r"(.+?)(\.base_layer|\.modules_to_save(\.default)?)?\.([^.]+)")
FOREIGN: Mapping[str, str] = {
    "lora_magnitude_vector": "DoRA",
    "lora_B": "a bias of lora_B",
    "lora_": "this kind of adapter",
    "trainable_tokens": "an embedding of which some tokens were trained",
    "original_module": "a copy of what was trained",
}
"""Part of the name of a refused tensor -> what the tensor belongs to; the first entry that matches counts."""
CACHE_PARTS = 8
"""Cached matrices may take 1 / `CACHE_PARTS` of the host memory of a load."""


@dataclass(frozen=True)
class MatrixPair:
    """The two matrices of an adapted weight."""

    a: Tensor
    b: Tensor
    a_name: str
    b_name: str
    is_embedding: bool

    @property
    def rank(self) -> int:
        """The common dimension of the two matrices."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """The parts of an adapter; weights have the names of the adapted model."""

    where: str
    """Name of the adapter's folder, for messages."""
    config: AdapterConfig
    pairs: Mapping[str, MatrixPair]
    """Name of a weight -> its two matrices."""
    saved: Mapping[str, Tensor]
    """Name -> tensor of the parameters that the adapter saves whole."""
    stored: tuple[Tensor, ...]
    """All tensors in the adapter's files."""
    config_digest: str
    cache: MatrixCache

    @property
    def versions(self) -> dict[str, str]:
        """Path of each of the adapter's files -> version of its content."""
        return {f"{PART_OF_RUN}{CONFIG}": self.config_digest} | {
            tensor.file_name: tensor.file.version for tensor in self.stored
        }


def read_adapter(folder: Folder, cache_bytes: int = 0) -> Adapter:
    """Read the configuration and the headers of an adapter.

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.storage import open_folder
    >>> config = '{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}'
    >>> matrices = {"A": np.ones((1, 4), np.float32), "B": np.ones((8, 1), np.float32)}
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, CONFIG).write_text(config)
    ...     save_file({f"{PREFIX}q_proj.lora_{name}.weight": matrices[name] for name in "AB"}, f"{folder}/{SINGLE}")
    ...     adapter = read_adapter(open_folder(folder))
    >>> {name: pair.rank for name, pair in adapter.pairs.items()}
    {'q_proj.weight': 1}

    Args:
        cache_bytes: most host memory for matrices that are kept after they were used.

    Raises:
        ConfigError: there is no adapter in the folder, or it is of a kind that is not supported.
        CheckpointError: tensors are missing, unknown or damaged.
    """
    data = read_bytes(folder, CONFIG)
    if data is None:
        is_model = folder.open("config.json") is not None or folder.open(MODEL_FILES.single) is not None
        kind = "it is a model: name it as model.ref" if is_model else "name the folder that PEFT saved an adapter in"
        raise ConfigError(f"model.adapter: {folder.ref} has no {CONFIG}; {kind}")
    config = parse_adapter_config(data, f"{folder.ref}/{CONFIG}")
    has_single, has_index = (folder.open(name) is not None for name in (FILES.single, FILES.index))
    if has_single and has_index:
        raise CheckpointError(f"{folder.ref} holds both {FILES.single} and {FILES.index}; remove the one not meant")
    if not has_single and not has_index:
        is_pickle = folder.open(PICKLE) is not None
        remedy = f"save {PICKLE} as safetensors, which PEFT does by default" if is_pickle else "download it again"
        raise CheckpointError(f"{folder.ref} has no {FILES.single}; {remedy}")
    tensors = {
        name: replace(tensor, path=f"{PART_OF_RUN}{tensor.file_name}")
        for name, tensor in read_index(folder, FILES).items()
    }
    if not tensors:
        raise CheckpointError(f"{folder.ref}: {FILES.single} holds no tensors, so that the adapter changes nothing")
    pairs, saved = _sort_tensors(tensors, folder.ref)
    _check_ranks(config, pairs, folder.ref)
    digest = hashlib.sha256(data).hexdigest()[:16]
    stored = tuple(tensors.values())
    return Adapter(folder.ref, config, pairs, saved, stored, digest, MatrixCache(cache_bytes))


def _sort_tensors(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, MatrixPair], dict[str, Tensor]]:
    """Map weights to their pairs of matrices, and names to the tensors that the adapter saves in full."""
    matrices: defaultdict[str, dict[tuple[bool, str], str]] = defaultdict(dict)
    saved: dict[str, str] = {}
    for name, tensor in tensors.items():
        _check_type(name, tensor)
        own = name.removeprefix(PREFIX)
        if match := MATRIX.fullmatch(own):
            module, embedding, letter, *_ = match.groups()
            same = matrices[f"{module}.weight"].setdefault((embedding is not None, letter), name)
        elif (match := WHOLE.fullmatch(own)) and not any(part in own for part in FOREIGN):
            module, *_, parameter = match.groups()
            same = saved.setdefault(f"{module}.{parameter}", name)
        else:
            kind = next((kind for part, kind in FOREIGN.items() if part in own), None)
            problem = f"{kind} is not supported" if kind else "no LoRA adapter has a tensor of this name"
            raise CheckpointError(f"{where} holds {name}: {problem}; {REMEDY}")
        if same != name:
            raise CheckpointError(f"{where} holds both {same} and {name}, which are one tensor; remove one of the two")
    pairs = {name: _pair(parts, tensors, where) for name, parts in matrices.items()}
    return pairs, {own: tensors[name] for own, name in saved.items()}


def _check_type(name: str, tensor: Tensor) -> None:
    try:
        ml_dtypes.finfo(tensor.dtype)
    except ValueError:
        raise CheckpointError(
            f"{tensor.file.name}: {name} is stored as {tensor.dtype}; it must be floating-point"
        ) from None


def _pair(parts: Mapping[tuple[bool, str], str], tensors: Mapping[str, Tensor], where: str) -> MatrixPair:
    """Return the two matrices of one weight, checked to fit each other.

    Args:
        parts: (whether the matrix belongs to an embedding, "A" or "B") -> name of the tensor.
    """
    kinds = {is_embedding for is_embedding, _ in parts}
    first = next(iter(parts.values()))
    if len(kinds) > 1:
        raise CheckpointError(f"{where} has matrices of a linear layer and of an embedding for one weight ({first})")
    (is_embedding,) = kinds
    for letter in "AB":
        if (is_embedding, letter) not in parts:
            raise CheckpointError(f"{where} has {first} without its lora_{letter}; download it again")
    a_name, b_name = parts[is_embedding, "A"], parts[is_embedding, "B"]
    a, b = tensors[a_name], tensors[b_name]
    for name, tensor in ((a_name, a), (b_name, b)):
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(tensor.shape)}; adapters of matrices alone are supported, with "
                "two dimensions, none of them 0"
            )
    if a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"{where}: {a_name} has the shape {list(a.shape)}, and {b_name} {list(b.shape)}; the first dimension of A "
            "and the last one of B must be the rank"
        )
    return MatrixPair(a, b, a_name, b_name, is_embedding)


def _check_ranks(config: AdapterConfig, pairs: Mapping[str, MatrixPair], where: str) -> None:
    for name, pair in pairs.items():
        rank = config.rank_of(name.removesuffix(".weight"))
        if pair.rank != rank:
            raise CheckpointError(
                f"{where}: {pair.a_name} has the rank {pair.rank}, and {CONFIG} says {rank} (r, rank_pattern); use the "
                f"{CONFIG} that was saved with it"
            )
