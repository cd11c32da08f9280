"""Reads the adapter_config.json of an adapter: every key is read, is known to change no weight, or is refused by name.

What keys mean is what PEFT does with them: `LoraConfig`, `get_pattern_key` and `check_target_module_exists` of
https://github.com/huggingface/peft.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shardplan.checkpoint.format.strict_json import parse_json
from shardplan.errors import ConfigError, one_line
from shardplan.model.huggingface.checked_keys import CheckedKeys
from shardplan.storage.contents import describe_contents

ALL_LINEAR = "all-linear"
"""Value of `target_modules` for all linear layers but the output head."""
ADAPTER_TYPE = "LORA"
TASK = "CAUSAL_LM"
REMEDY = "merge the adapter with PEFT (merge_and_unload), and name the merged folder as model.ref"
WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "merge_weights",
    "peft_version", "qalora_group_size", "revision", "runtime_config",
)  # fmt: skip
"""Keys on how an adapter was trained or how PEFT runs it; no merged weight depends on them."""
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias of lora_B",
    "layer_replication": "the replication of layers",
    "target_parameters": "an adapter of parameters outside of linear layers, such as stacked experts,",
    "trainable_token_indices": "an embedding of which some tokens were trained",
    "alora_invocation_tokens": "Activated LoRA, which no merged weight can compute,",
    "arrow_config": "Arrow",
    "corda_config": "CorDA",
    "enable_lora": "an adapter of some parts of a joint matrix",
    "eva_config": "EVA",
    "kasa_config": "KaSA",
    "loftq_config": "LoftQ",
    "lora_ga_config": "LoRA-GA",
    "megatron_config": "a model of Megatron",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Refused key -> the feature that the key turns on."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged."""
OTHER_STARTS: Mapping[str, str] = {
    "eva": "EVA leaves out layers, as a damaged file would",
    "mica": "MiCA is not supported",
    **dict.fromkeys(("pissa", "olora", "corda", "loftq", "lora_ga"), "it is for other base weights than the model has"),
}
"""Beginning of other values of `init_lora_weights` -> why they are refused."""


class BiasKind(StrEnum):
    """The biases that were trained with an adapter and are saved in it."""

    NONE = "none"
    ALL = "all"
    ADAPTED = "lora_only"
    """The biases of modules that have an adapter."""


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter_config.json that concern weights, by the module names of the adapted model."""

    where: str
    """Name of the file, for messages."""
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    """Regular expression for the end of a module's name -> the module's rank; the first one that matches counts."""
    alpha_pattern: Mapping[str, float]
    is_rank_stabilized: bool
    """Whether the scaling is alpha / sqrt(rank), in place of alpha / rank."""
    is_transposed: bool
    """Whether the adapter's configuration says that weights are stored as {inputs, outputs}."""
    targets: str | tuple[str, ...]
    """Adapted modules: the ends of their names, or a regular expression for a name."""
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    """Indices of the adapted layers; empty for all layers."""
    layer_lists: tuple[str, ...]
    """Regular expressions for the names of the lists of layers; empty for any list."""
    saved_modules: tuple[str, ...]
    """Ends of the names of modules that were saved whole."""
    bias: BiasKind
    ties_embeddings: bool
    """Whether the output head of a tied model changes with its embedding."""

    def rank_of(self, module: str) -> int:
        """Return the rank of the adapter of a module."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor by which a module's matrix product is scaled."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilized else alpha / rank

    def is_target(self, module: str) -> bool:
        """Return whether a linear layer or embedding has an adapter."""
        if _is_named(module, self.excluded) or self.is_saved(module):
            return False
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, module) is not None
        return _is_named(module, self.targets) and (not self.layers or self._layer_of(module) in self.layers)

    def is_saved(self, module: str) -> bool:
        """Return whether the adapter holds a module in full, or a module that contains it."""
        parts = module.split(".")
        outer = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return any(each.endswith(end) for each in outer for end in self.saved_modules)

    def _layer_of(self, module: str) -> int | None:
        for each in self.layer_lists or (r"[^.]*",):
            if match := re.match(rf".*?\.{each}\.(\d+)\.", module):
                return int(match[1])
        return None


def _by_pattern[T](patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of a module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _is_named(module: str, names: str | tuple[str, ...]) -> bool:
    """Return whether a module's name ends with one of `names`, or matches the regular expression."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def parse_adapter_config(data: bytes, where: str) -> AdapterConfig:
    """Parse the content of an adapter_config.json.

    >>> text = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}'
    >>> config = parse_adapter_config(text, "here")
    >>> config.rank, config.alpha, config.targets
    (8, 16.0, ('q_proj',))

    Args:
        where: name of the file, for messages.

    Raises:
        ConfigError: the file is damaged, a key is unknown, or a value is not supported.
    """
    try:
        values = parse_json(data.decode(json.detect_encoding(data)))
    except (ValueError, RecursionError) as error:
        problem = describe_contents(data) or f"{one_line(error)}; correct it, or download it again"
        raise ConfigError(f"{where} is damaged: {problem}") from error
    keys = CheckedKeys(values, where)
    kind = keys.take("peft_type", None)
    if kind != ADAPTER_TYPE:
        raise ConfigError(f"{where}: peft_type is {kind!r}, and only {ADAPTER_TYPE} is supported; {REMEDY}")
    task = keys.take("task_type", TASK)
    if task != TASK:
        raise ConfigError(f"{where}: task_type is {task!r}; an adapter of a language model has {TASK}")
    for name, meaning in REFUSED.items():
        value = keys.take(name, None)
        if value:
            raise ConfigError(f"{where}: {name} is {value!r}: {meaning} is not supported; {REMEDY}")
    _check_start(keys)
    config = AdapterConfig(
        where,
        _rank(keys.take("r", 8), f"{where}.r"),
        _alpha(keys.take("lora_alpha", 8), f"{where}.lora_alpha"),
        {name: _rank(value, f"{where}.rank_pattern.{name}") for name, value in _patterns(keys, "rank_pattern")},
        {name: _alpha(value, f"{where}.alpha_pattern.{name}") for name, value in _patterns(keys, "alpha_pattern")},
        keys.is_true("use_rslora", False),
        keys.is_true("fan_in_fan_out", False),
        _modules(keys, "target_modules"),
        _modules(keys, "exclude_modules"),
        _layers(keys),
        _layer_lists(keys),
        tuple(keys.names("modules_to_save")),
        BiasKind(keys.take("bias", BiasKind.NONE.value, *map(str, BiasKind))),
        keys.is_true("ensure_weight_tying", False),
    )
    keys.check(*WITHOUT_EFFECT)
    if not config.targets and not config.saved_modules:
        raise ConfigError(f"{where}.target_modules is {values.get('target_modules')!r}; it must name modules")
    return config


def _check_start(keys: CheckedKeys) -> None:
    """Check that an adapter does not require changed base weights."""
    start = keys.take("init_lora_weights", True)
    if start in PLAIN_STARTS and type(start) in (bool, str):
        return
    why = next((why for name, why in OTHER_STARTS.items() if str(start).lower().startswith(name)), None)
    if why is None:
        raise ConfigError(
            f"{keys.where}.init_lora_weights is {start!r}; it must be {' or '.join(map(repr, PLAIN_STARTS))}"
        )
    raise ConfigError(
        f"{keys.where}: init_lora_weights is {start!r}: {why}; save the adapter with "
        "path_initial_model_for_weight_conversion, or merge it with PEFT"
    )


def _rank(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where} is {value!r}; it must be a positive integer")
    return value


def _alpha(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value == 0:
        raise ConfigError(f"{where} is {value!r}; it must be a number, and not 0: the adapter would change nothing")
    return float(value)


def _patterns(keys: CheckedKeys, name: str) -> Iterable[tuple[str, Any]]:
    """Return the regular expressions of a mapping with their values."""
    values = keys.take(name, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{keys.where}.{name} is {values!r}; it must map names of modules to numbers")
    for pattern in values:
        _check_pattern(pattern, f"{keys.where}.{name}")
    return values.items()


def _modules(keys: CheckedKeys, name: str) -> str | tuple[str, ...]:
    """Return a value that is a regular expression or a list of module names."""
    if not isinstance(keys.values.get(name), str):
        return tuple(keys.names(name))
    pattern: str = keys.take(name, "")
    _check_pattern(pattern, f"{keys.where}.{name}")
    return pattern


def _layers(keys: CheckedKeys) -> tuple[int, ...]:
    value = keys.take("layers_to_transform", [])
    layers = [value] if type(value) is int else value
    if not isinstance(layers, list) or not all(type(each) is int and each >= 0 for each in layers):
        raise ConfigError(f"{keys.where}.layers_to_transform is {value!r}; it must list numbers of layers")
    return tuple(layers)


def _layer_lists(keys: CheckedKeys) -> tuple[str, ...]:
    value = keys.values.get("layers_pattern")
    if isinstance(value, str):
        keys.take("layers_pattern", "")
    patterns = ([value] if value else []) if isinstance(value, str) else keys.names("layers_pattern")
    for pattern in patterns:
        _check_pattern(pattern, f"{keys.where}.layers_pattern")
    return tuple(patterns)


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where} has {pattern!r}, which is no regular expression: {error}") from error
