"""The tokenizer of a checkpoint folder."""

from collections.abc import Callable

from tokenizers import Tokenizer

from shardplan.errors import CheckpointError, one_line
from shardplan.storage import Folder, read_bytes


def load_encoder(folder: Folder) -> Callable[[str], list[int]]:
    """Load the function from a text to its token ids, special tokens included.

    Raises:
        CheckpointError: no tokenizer.json, or not one.
    """
    data = read_bytes(folder, "tokenizer.json")
    if data is None:
        raise CheckpointError(f"{folder.ref} has no tokenizer.json; save a fast tokenizer there with transformers")
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder.ref}/tokenizer.json is damaged: {one_line(error)}") from error
    # tokenizer.json keeps the settings of its last use; here every token of a text counts, and padding does not
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(text).ids
        except Exception as error:
            raise CheckpointError(f"{folder.ref}/tokenizer.json cannot encode the text: {one_line(error)}") from error

    return encode
