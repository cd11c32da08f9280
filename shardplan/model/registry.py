"""Builds the model of a Hugging Face configuration, by the class that computes it."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from levanter.layers.attention import Attention, AttentionMask

from shardplan.errors import ConfigError, one_line
from shardplan.model.attention.attention_calls import REPLACEABLE_CALLS
from shardplan.model.corrections.levanter_compat import correct_levanter_config, prepare_hf_config, sliding_window
from shardplan.model.corrections.soft_cap import cap_gemma2_logits
from shardplan.model.gradient_checkpointing.activation_names import named_as_configured
from shardplan.model.huggingface.hf_config import check_config
from shardplan.model.huggingface.kept_codes import KEEP_KEY, kept_codes
from shardplan.model.huggingface.quantization import ByteCodes
from shardplan.model.model_class import CLASS_KEY, DECODER, LEVANTER, LEVANTER_CLASSES, class_of, is_own_class
from shardplan.model.own_model import load_own_class

SAME_KEYS = {"kimi_k2": "deepseek_v3"}
"""Model type unknown to transformers -> a type with the same configuration."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model without weights: its configuration, and its module tree with abstract arrays.

    The module is a Levanter `LmHeadModel`: shardplan's decoder, a class of Levanter, or a user's own class.
    """

    type: str
    """Hugging Face `model_type`."""
    class_name: str
    """Name of the class of `config` (`shardplan.model.model_class`)."""
    config: Any
    """The model's configuration, a Levanter `LmConfig`."""
    template: Any
    """The model's module, with `jax.ShapeDtypeStruct`s in place of arrays."""
    mask: AttentionMask
    """The mask that the model is called with; its layers may restrict it further."""
    logit_soft_cap: float | None
    """Bound of the logits, applied as `cap * tanh(logits / cap)` (Gemma 2)."""
    positions: int
    """Number of positions of the model."""

    @property
    def uses_levanter_attention(self) -> bool:
        """Whether all attention is in Levanter's `Attention` modules with calls in `REPLACEABLE_CALLS`."""
        leaves = jax.tree.leaves(self.template, is_leaf=lambda node: isinstance(node, Attention))
        modules = [leaf for leaf in leaves if isinstance(leaf, Attention)]
        return bool(modules) and all(type(module).__call__ in REPLACEABLE_CALLS for module in modules)

    @property
    def is_decoder(self) -> bool:
        """Whether the model is shardplan's decoder, whose attention supports any order of positions."""
        return self.class_name == DECODER

    @property
    def kept(self) -> ByteCodes | None:
        """The stored form in which weights stay on the devices; None if all are decoded at loading."""
        return self.config.kept if self.is_decoder else None

    @property
    def is_attention_planned(self) -> bool:
        """Whether plans choose the model's attention method; if so, every method and order of positions is possible."""
        return self.uses_levanter_attention or self.is_decoder

    @property
    def vocab(self) -> hax.Axis:
        """The vocabulary axis."""
        return self.template.Vocab


def config_class(name: str) -> Any:
    """Import a configuration class by its name in `shardplan.model.model_class`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def name_of_class(config_class: type) -> str:
    """Return the name of a configuration class, as `package.module:Class`."""
    return f"{config_class.__module__}:{config_class.__qualname__}"


def abstract_module(config: Any, vocab: hax.Axis) -> Any:
    """Make the module of a Levanter configuration with `jax.ShapeDtypeStruct`s for arrays, without computing any."""
    if hasattr(config, "final_logit_softcapping"):
        cap_gemma2_logits()
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return named_as_configured(eqx.filter_eval_shape(config.model_type.init, vocab, config, key=key), config)


def transformers_config(hf_config: dict[str, Any]) -> Any:
    """Make the transformers configuration of a config.json, even if transformers lacks the model type."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    model_type = hf_config["model_type"]
    if model_type in CONFIG_MAPPING:
        return AutoConfig.for_model(**hf_config)
    if model_type in SAME_KEYS:
        known = CONFIG_MAPPING[SAME_KEYS[model_type]]
        return type(known.__name__, (known,), {"model_type": model_type})(**hf_config)
    return PretrainedConfig(**hf_config)


def build_model(hf_config: dict[str, Any], position: int, shorten: bool = False) -> Model:
    """Build the model of the config.json `hf_config`, for sequences of `position` tokens.

    Args:
        hf_config: config.json as `read_config` returns it, including the class that computes the model.
        shorten: if the model has fewer than `position` positions, build it for all of its positions.

    Raises:
        ConfigError: the model type is not supported, the class cannot express the configuration, or the model has
            fewer than `position` positions.
    """
    name = class_of(hf_config)
    if not is_own_class(name):
        hf_config = check_config(hf_config, "config.json")  # again, because a caller may have changed keys
    if name == DECODER:
        return _build_decoder(hf_config, position, shorten)
    return _build_levanter(hf_config, name, position, shorten)


def _build_levanter(hf_config: dict[str, Any], name: str, position: int, shorten: bool) -> Model:
    """Build a model with a class of Levanter, or with a user's own class; see `build_model`."""
    model_type = hf_config["model_type"]
    is_corrected = name == LEVANTER_CLASSES.get(model_type)
    if not is_corrected and not is_own_class(name):
        raise ConfigError(
            f"model.levanter_class is {name}, which is not for a {model_type}; leave it out, or set it to {LEVANTER}"
        )
    try:
        hf = transformers_config({key: value for key, value in hf_config.items() if key != CLASS_KEY})
        if is_corrected:
            config = correct_levanter_config(config_class(name).from_hf_config(prepare_hf_config(hf)), hf)
            positions = config.max_Pos.size
            position = min(position, positions) if shorten else position
            window = sliding_window(hf, position)
            soft_cap = hf.final_logit_softcapping if model_type == "gemma2" else None
        else:
            config = load_own_class(name).from_hf_config(hf)
            positions = config.max_Pos.size
            position = min(position, positions) if shorten else position
            window, soft_cap = getattr(config, "mask_window", None), getattr(config, "logit_soft_cap", None)
        template = abstract_module(config, hax.Axis("vocab", hf.vocab_size))
    except ConfigError:
        raise
    except Exception as error:  # Levanter and transformers raise anything for an odd configuration
        raise ConfigError(f"config.json: Levanter cannot express this {model_type}: {one_line(error)}") from error
    _check_positions(position, positions)
    mask = AttentionMask.causal(sliding_window=window)
    return Model(model_type, name, config, template, mask, soft_cap, positions)


def _build_decoder(hf_config: dict[str, Any], position: int, shorten: bool) -> Model:
    """Build a model with shardplan's own decoder; see `build_model`."""
    model_type = hf_config["model_type"]
    values = {key: value for key, value in hf_config.items() if key != KEEP_KEY}
    config = replace(config_class(DECODER).from_hf_config(values), kept=kept_codes(hf_config))
    positions = config.max_Pos.size
    position = min(position, positions) if shorten else position
    config.check_length(position, "workload.position")
    _check_positions(position, positions)
    template = abstract_module(config, hax.Axis("vocab", hf_config["vocab_size"]))
    return Model(model_type, DECODER, config, template, AttentionMask.causal(), config.logit_soft_cap, positions)


def _check_positions(position: int, positions: int) -> None:
    """Check that a model has as many positions as a workload requires.

    Raises:
        ConfigError: the model has fewer.
    """
    if position > positions:
        raise ConfigError(f"workload.position is {position}; the model has {positions} positions, use at most that")
