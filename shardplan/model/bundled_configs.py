"""Reads the config.json that `model.config` names: a file, or that of a released model that is part of the package."""

from pathlib import Path

from shardplan.errors import ConfigError, nearest

BUNDLED = {path.stem: path for path in sorted(Path(__file__).with_name("configs").glob("*.json"))}
"""Name of a released model -> its config.json, which is part of the package, so that planning needs no network."""

HUB_NAMES = {
    "gemma-3-27b": ("google/gemma-3-27b-pt", "google/gemma-3-27b-it"),
    "gemma-7b": ("google/gemma-7b", "google/gemma-7b-it"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "olmo-3-32b": ("allenai/Olmo-3-1125-32B",),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B", "allenai/OLMo-2-0325-32B-Instruct"),
    "phi-4": ("microsoft/phi-4",),
    "pythia-12b": ("EleutherAI/pythia-12b", "EleutherAI/pythia-12b-deduped"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
}
"""Name of a bundled model -> its repositories on the Hugging Face hub, which have the same architecture."""


def bundled_name(ref: str) -> str | None:
    """Return the bundled model that a reference to the Hugging Face hub names, at any revision; None if none is.

    >>> bundled_name("meta-llama/Meta-Llama-3.1-8B@main")
    'llama-3.1-8b'
    """
    repository = ref.removeprefix("hf://").partition("@")[0].lower().replace("/meta-llama-", "/llama-")
    for name, repositories in HUB_NAMES.items():
        if repository in map(str.lower, repositories):
            return name
    return None


def read_config_file(name: str) -> bytes:
    """Read the config.json that `name` means, unchanged: the file of this path, or else that of the bundled model.

    Raises:
        ConfigError: there is neither, or it cannot be read.
    """
    path = Path(name)
    if name in BUNDLED and not path.is_file():
        path = BUNDLED[name]
    try:
        return path.read_bytes()
    except OSError as error:
        checkpoints = (file.parent.name for file in path.parent.glob("*/config.json"))
        raise ConfigError(
            f"model.config {name} is no bundled model, and cannot be read as a file: {error.strerror}; "
            f"{nearest(path.name.removesuffix('.json'), [*BUNDLED, *checkpoints])}"
        ) from error
