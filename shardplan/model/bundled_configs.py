"""Reads the config.json that `model.config` names: a file, or a released model that is bundled with the package."""

import re
from pathlib import Path

from shardplan.errors import ConfigError, closest


def by_size(name: str) -> list[str | float]:
    """Return a sort key that orders names of models by size: 125m before 1.3b, and 2b before 27b.

    >>> sorted(["opt-13b", "opt-125m", "opt-2.7b"], key=by_size)
    ['opt-125m', 'opt-2.7b', 'opt-13b']
    """
    parts = re.split(r"(\d+(?:\.\d+)?m?)", name)
    numbers = (float(part.rstrip("m")) / (1000 if part.endswith("m") else 1) for part in parts[1::2])
    return [*parts[:1], *(each for pair in zip(numbers, parts[2::2], strict=True) for each in pair)]


_FILES = Path(__file__).with_name("configs").glob("*.json")
BUNDLED = {path.stem: path for path in sorted(_FILES, key=lambda path: by_size(path.stem))}
"""Name of a released model, or nsa-125m -> path of its config.json in the package; planning needs no network."""

HUB_NAMES = {
    "apertus-8b": ("swiss-ai/Apertus-8B-2509", "swiss-ai/Apertus-8B-Instruct-2509"),
    "aya-23-8b": ("CohereLabs/aya-23-8B", "CohereForAI/aya-23-8B"),
    "command-a": ("CohereLabs/c4ai-command-a-03-2025",),
    "command-r": ("CohereLabs/c4ai-command-r-v01", "CohereForAI/c4ai-command-r-v01"),
    "command-r7b": ("CohereLabs/c4ai-command-r7b-12-2024", "CohereForAI/c4ai-command-r7b-12-2024"),
    "deepseek-v2": ("deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Chat"),
    "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-R1"),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"),
    "dots.llm1": ("rednote-hilab/dots.llm1.base", "rednote-hilab/dots.llm1.inst"),
    "ernie-4.5-21b-a3b": ("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-21B-A3B-Base-PT"),
    "exaone-4.0-32b": ("LGAI-EXAONE/EXAONE-4.0-32B",),
    "gemma-2-27b": ("google/gemma-2-27b", "google/gemma-2-27b-it"),
    "gemma-2-2b": ("google/gemma-2-2b", "google/gemma-2-2b-it"),
    "gemma-2-9b": ("google/gemma-2-9b", "google/gemma-2-9b-it"),
    "gemma-2b": ("google/gemma-2b", "google/gemma-2b-it"),
    "gemma-3-12b": ("google/gemma-3-12b-pt", "google/gemma-3-12b-it"),
    "gemma-3-1b": ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    "gemma-3-27b": ("google/gemma-3-27b-pt", "google/gemma-3-27b-it"),
    "gemma-3-4b": ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"),
    "gemma-7b": ("google/gemma-7b", "google/gemma-7b-it"),
    "glm-4-32b-0414": ("zai-org/GLM-4-32B-0414", "zai-org/GLM-4-32B-Base-0414", "THUDM/GLM-4-32B-0414"),
    "glm-4-9b": ("zai-org/glm-4-9b-chat-hf", "THUDM/glm-4-9b-chat-hf"),
    "glm-4-9b-0414": ("zai-org/GLM-4-9B-0414", "zai-org/GLM-Z1-9B-0414", "THUDM/GLM-4-9B-0414"),
    "glm-4.5": ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Base"),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", "zai-org/GLM-4.5-Air-Base"),
    "glm-4.7-flash": ("zai-org/GLM-4.7-Flash",),
    "glm-5": ("zai-org/GLM-5",),
    "gpt-j-6b": ("EleutherAI/gpt-j-6b",),
    "gpt-neox-20b": ("EleutherAI/gpt-neox-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt2": ("openai-community/gpt2",),
    "gpt2-large": ("openai-community/gpt2-large",),
    "gpt2-medium": ("openai-community/gpt2-medium",),
    "gpt2-xl": ("openai-community/gpt2-xl",),
    "granite-3.1-2b": ("ibm-granite/granite-3.1-2b-base",),
    "granite-3.1-8b": ("ibm-granite/granite-3.1-8b-base",),
    "hunyuan-a13b": ("tencent/Hunyuan-A13B-Instruct", "tencent/Hunyuan-A13B-Pretrain"),
    "hy3-preview": ("tencent/Hy3-preview",),
    "kimi-k2": ("moonshotai/Kimi-K2-Base", "moonshotai/Kimi-K2-Instruct"),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-chat-hf"),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct"),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct"),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct",),
    "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E-Instruct",),
    "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2",),
    "ministral-3-3b": ("mistralai/Ministral-3-3B-Base-2512",),
    "ministral-3-8b": ("mistralai/Ministral-3-8B-Base-2512",),
    "mistral-7b-v0.1": ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.1"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "mistral-nemo-12b": ("mistralai/Mistral-Nemo-Base-2407",),
    "mistral-small-24b": ("mistralai/Mistral-Small-24B-Base-2501", "mistralai/Mistral-Small-24B-Instruct-2501"),
    "mistral-small-4-119b": ("mistralai/Mistral-Small-4-119B-2603",),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-Instruct-v0.1",),
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "moonlight-16b": ("moonshotai/Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct"),
    "olmo-3-32b": ("allenai/Olmo-3-1125-32B",),
    "olmo-3-7b": ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-7B-Think"),
    "olmo2-13b": ("allenai/OLMo-2-1124-13B", "allenai/OLMo-2-1124-13B-Instruct"),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B", "allenai/OLMo-2-0325-32B-Instruct"),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", "allenai/OLMo-2-1124-7B-Instruct"),
    "olmoe-1b-7b": ("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0924-Instruct"),
    "opt-1.3b": ("facebook/opt-1.3b",),
    "opt-125m": ("facebook/opt-125m",),
    "opt-13b": ("facebook/opt-13b",),
    "opt-2.7b": ("facebook/opt-2.7b",),
    "opt-30b": ("facebook/opt-30b",),
    "opt-6.7b": ("facebook/opt-6.7b",),
    "opt-66b": ("facebook/opt-66b",),
    "phi-1.5": ("microsoft/phi-1_5",),
    "phi-2": ("microsoft/phi-2",),
    "phi-3-mini-4k": ("microsoft/Phi-3-mini-4k-instruct",),
    "phi-3.5-mini": ("microsoft/Phi-3.5-mini-instruct",),
    "phi-4": ("microsoft/phi-4",),
    "phi-4-mini": ("microsoft/Phi-4-mini-instruct",),
    "pythia-1.4b": ("EleutherAI/pythia-1.4b", "EleutherAI/pythia-1.4b-deduped"),
    "pythia-12b": ("EleutherAI/pythia-12b", "EleutherAI/pythia-12b-deduped"),
    "pythia-160m": ("EleutherAI/pythia-160m", "EleutherAI/pythia-160m-deduped"),
    "pythia-1b": ("EleutherAI/pythia-1b", "EleutherAI/pythia-1b-deduped"),
    "pythia-2.8b": ("EleutherAI/pythia-2.8b", "EleutherAI/pythia-2.8b-deduped"),
    "pythia-410m": ("EleutherAI/pythia-410m", "EleutherAI/pythia-410m-deduped"),
    "pythia-6.9b": ("EleutherAI/pythia-6.9b", "EleutherAI/pythia-6.9b-deduped"),
    "pythia-70m": ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m-deduped"),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B",),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B",),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B",),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B",),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B",),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B",),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B",),
    "qwen3-14b": ("Qwen/Qwen3-14B",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "qwen3-4b": ("Qwen/Qwen3-4B",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "seed-oss-36b": ("ByteDance-Seed/Seed-OSS-36B-Base", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "smollm2-1.7b": ("HuggingFaceTB/SmolLM2-1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M", "HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B",),
    "stablelm-2-1.6b": ("stabilityai/stablelm-2-1_6b", "stabilityai/stablelm-2-zephyr-1_6b"),
    "stablelm-3b-4e1t": ("stabilityai/stablelm-3b-4e1t",),
    "starcoder2-15b": ("bigcode/starcoder2-15b",),
    "starcoder2-3b": ("bigcode/starcoder2-3b",),
    "starcoder2-7b": ("bigcode/starcoder2-7b",),
    "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
}
"""Name of a bundled model -> its repositories on the Hugging Face hub, which have the same architecture."""


def bundled_name(ref: str) -> str | None:
    """Return the bundled model for a reference to the Hugging Face hub, at any revision; None if it is not bundled.

    >>> bundled_name("meta-llama/Meta-Llama-3.1-8B@main")
    'llama-3.1-8b'
    """
    repository = _repository(ref.removeprefix("hf://").partition("@")[0])
    for name, repositories in HUB_NAMES.items():
        if repository in map(_repository, repositories):
            return name
    return None


def _repository(name: str) -> str:
    """Return a repository's name in lower case; older names of Llama 3 and 3.1 are replaced by newer ones."""
    return name.lower().replace("/meta-llama-", "/llama-")


def read_config_file(name: str) -> bytes:
    """Read, unchanged, the config.json at the path `name`, or else the config.json of the bundled model `name`.

    Raises:
        ConfigError: there is neither such a file nor such a model, or the file cannot be read.
    """
    path = Path(name)
    if name in BUNDLED and not path.is_file():
        path = BUNDLED[name]
    try:
        return path.read_bytes()
    except OSError as error:
        checkpoints = (file.parent.name for file in path.parent.glob("*/config.json"))
        meant = closest(path.name.removesuffix(".json"), [*BUNDLED, *checkpoints])
        hint = f"did you mean {meant!r}?" if meant else "`shardplan models` lists the names of bundled models"
        raise ConfigError(
            f"model.config {name} is no bundled model, and cannot be read as a file: {error.strerror}; {hint}"
        ) from error
