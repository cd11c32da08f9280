"""The tokenizer of a checkpoint folder."""

from collections.abc import Callable

from tokenizers import Tokenizer

from shardplan.errors import CheckpointError
from shardplan.runtime.storage import Folder, read_bytes


def load_encoder(folder: Folder) -> Callable[[str], list[int]]:
    """text -> token ids, with the special tokens that the tokenizer puts around a text.

    Raises:
        CheckpointError: no tokenizer.json, or not one.
    """
    data = read_bytes(folder, "tokenizer.json")
    if data is None:
        raise CheckpointError(f"{folder.ref} has no tokenizer.json; save a fast tokenizer there with transformers")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder.ref}/tokenizer.json is damaged: {error}") from error
    return lambda text: tokenizer.encode(text).ids
