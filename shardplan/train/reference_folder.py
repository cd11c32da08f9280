"""Writes a folder with config.json and tokenizer, for trainings whose model or data has no checkpoint with these.

Levanter makes its converter, which exports checkpoints, from such files, even if no weights are loaded. The tokens of
synthetic data are words too: the word 17 is token 17.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from shardplan.errors import ConfigError, one_line
from shardplan.plan.serialization import json_bytes

FOLDER = "model"
"""Name of this folder within the output folder."""
CACHE = "~/.cache/shardplan/train"
"""Location of this folder on every host if the output folder is remote, because transformers reads local files."""


def reference_path(output: str) -> str:
    """Return the path of the folder for the output folder `output`, an absolute path or a URL."""
    if "://" not in output:
        return f"{output}/{FOLDER}"
    return str(Path(CACHE).expanduser() / hashlib.sha256(output.encode()).hexdigest()[:16])


def write_reference(path: str, hf_config: dict[str, Any], vocab_size: int, tokenizer: str | None) -> None:
    """Write the folder with config.json and tokenizer.

    Args:
        hf_config: content of config.json.
        tokenizer: folder or repository of the data's tokenizer; None for a tokenizer whose words are numbers.

    Raises:
        ConfigError: the tokenizer cannot be read, or the folder cannot be written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(json_bytes(hf_config))
        if tokenizer is None:
            _write_numbers(folder, vocab_size)
        else:
            _copy_tokenizer(folder, tokenizer)
    except OSError as error:
        raise ConfigError(f"output: {path} cannot be written: {one_line(error)}") from error


def _write_numbers(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def _copy_tokenizer(folder: Path, tokenizer: str) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {one_line(error)}") from error
