"""The tokenizer of a checkpoint folder."""

from shardplan.checkpoint.format.index import read_tensor_index
from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.errors import CheckpointError
from shardplan.eval.texts.added_tokens import with_added_tokens
from shardplan.model.registry import Model
from shardplan.storage import Folder, read_bytes


def read_tokenizer(folder: Folder) -> bytes:
    """Return the tokenizer.json of a checkpoint folder, with the tokens that other files of the folder add.

    Raises:
        CheckpointError: the folder has no tokenizer.json, or a file is damaged.
    """
    data = read_bytes(folder, "tokenizer.json")
    if data is None:
        raise CheckpointError(f"{folder.ref} has no tokenizer.json; save a fast tokenizer there with transformers")
    return with_added_tokens(data, folder)


def check_tokens(largest: int, model: Model, folder: Folder) -> None:
    """Check that the model has an embedding for every token up to `largest`, the largest in the texts.

    Raises:
        CheckpointError: a token has no embedding; the message says whether config.json or the tokenizer differs from
            the weights.
    """
    size = model.vocab.size
    if largest < size:
        return
    rows = _embedding_rows(model, folder)
    produced = f"{folder.ref}: tokenizer.json produces token {largest}"
    if rows == size:
        raise CheckpointError(
            f"{produced}, but config.json and the embedding of the weights have {size} tokens; use the tokenizer of "
            "this model"
        )
    advice = f"set vocab_size to {rows}" if largest < rows else "use the config.json and the tokenizer of this model"
    raise CheckpointError(
        f"{produced} and the embedding of the weights has {rows} rows, but config.json has vocab_size {size}; {advice}"
    )


def _embedding_rows(model: Model, folder: Folder) -> int:
    """Return the number of rows of the stored embedding; without one, the vocabulary size in config.json."""
    size, tensors = model.vocab.size, read_tensor_index(folder).tensors
    names = [name for name, shape in expected_tensors(model.template).items() if shape[:1] == (size,)]
    rows = {
        tensor.shape[0]
        for stored, tensor in tensors.items()
        if tensor.shape and any(f".{stored}".endswith(f".{name}") for name in names)
    }
    return next(iter(rows - {size}), size)
