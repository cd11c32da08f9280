"""The tokenizer of a checkpoint folder as transformers loads it, with its special tokens and chat template."""

import tempfile
from pathlib import Path
from typing import Any

from shardplan.errors import CheckpointError, one_line
from shardplan.storage import Folder, read_bytes

TOKENIZER_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model",
    "spiece.model",
)  # fmt: skip
"""Files from which a tokenizer is made; config.json gives its class if no other file does."""


def load_tokenizer(folder: Folder, **settings: Any) -> Any:
    """Load the tokenizer (a `transformers.PreTrainedTokenizerBase`) of a checkpoint folder in any store.

    Args:
        settings: keyword arguments of `AutoTokenizer.from_pretrained`.

    Raises:
        CheckpointError: the folder has no tokenizer, or a damaged one.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="shardplan-tokenizer-") as copy:
        names = set[str]()
        for name in TOKENIZER_FILES:
            data = read_bytes(folder, name)
            if data is not None:
                names.add(name)
                Path(copy, name).write_bytes(data)
        if names <= {"config.json"}:
            raise CheckpointError(f"{folder.ref} has no tokenizer; save one there with transformers")
        try:
            tokenizer = AutoTokenizer.from_pretrained(copy, **settings)
        except Exception as error:  # anything, for a damaged file
            raise CheckpointError(f"{folder.ref}: transformers cannot load the tokenizer: {one_line(error)}") from error
    tokenizer.name_or_path = folder.ref
    return tokenizer
