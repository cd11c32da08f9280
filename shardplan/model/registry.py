"""Builds the Levanter model of a Hugging Face configuration, for every supported model type."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from levanter.layers.attention import Attention

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model.levanter_compat import correct_levanter_config, prepare_hf_config, sliding_window
from shardplan.positions.pattern import Pattern

SUPPORTED_MODELS = {
    "gemma": ("levanter.models.gemma", "GemmaConfig"),
    "gemma2": ("levanter.models.gemma", "Gemma2Config"),
    "gpt2": ("levanter.models.gpt2", "Gpt2Config"),
    "llama": ("levanter.models.llama", "LlamaConfig"),
    "mistral": ("levanter.models.mistral", "MistralConfig"),
    "mixtral": ("levanter.models.mixtral", "MixtralConfig"),
    "olmo2": ("levanter.models.olmo", "Olmo2Config"),
    "qwen2": ("levanter.models.qwen", "QwenConfig"),
    "qwen3": ("levanter.models.qwen", "Qwen3Config"),
}
"""Hugging Face `model_type` -> module and name of the Levanter configuration class."""


@dataclass(frozen=True, eq=False)
class Model:
    """A Levanter model without weights: its configuration, and its module tree with abstract arrays."""

    type: str
    """Hugging Face `model_type`."""
    config: Any
    """Levanter's configuration (an `HFCompatConfig`)."""
    template: Any
    """The Levanter module, with `jax.ShapeDtypeStruct`s in place of arrays."""
    sliding_window: int | None
    """Width in tokens of the attention window of every layer; None for full attention."""
    logit_soft_cap: float | None
    """Bound of the logits, applied as `cap * tanh(logits / cap)` (Gemma 2)."""

    @property
    def uses_levanter_attention(self) -> bool:
        """Whether its attention is Levanter's `Attention`, which most models share, and not a class of its own."""
        leaves = jax.tree.leaves(self.template, is_leaf=lambda node: isinstance(node, Attention))
        return any(isinstance(leaf, Attention) for leaf in leaves)

    @property
    def pattern(self) -> Pattern:
        """The mask pattern of its attention: causal, within the sliding window if there is one."""
        return Pattern(causal=True, window=self.sliding_window)

    @property
    def vocab(self) -> hax.Axis:
        """The vocabulary axis."""
        return self.template.Vocab


def levanter_config_class(model_type: str) -> Any:
    """Return the Levanter configuration class of a supported Hugging Face `model_type`."""
    module, name = SUPPORTED_MODELS[model_type]
    return getattr(import_module(module), name)


def abstract_module(config: Any, vocab: hax.Axis) -> Any:
    """Make the module of a Levanter configuration with a `jax.ShapeDtypeStruct` for every array, computing nothing."""
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return eqx.filter_eval_shape(config.model_type.init, vocab, config, key=key)


def build_model(hf_config: dict[str, Any], position: int) -> Model:
    """Build the Levanter model of the config.json `hf_config`, for sequences of `position` tokens.

    Raises:
        ConfigError: an unsupported model type, a configuration that Levanter's model cannot express, or more
            positions than the model has.
    """
    from transformers import AutoConfig

    model_type = hf_config["model_type"]
    if model_type not in SUPPORTED_MODELS:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; {nearest(str(model_type), SUPPORTED_MODELS)} "
            f"(supported: {', '.join(sorted(SUPPORTED_MODELS))})"
        )
    try:
        hf = prepare_hf_config(AutoConfig.for_model(**hf_config))
        config = correct_levanter_config(levanter_config_class(model_type).from_hf_config(hf), hf)
        window = sliding_window(hf, position)
        positions = int(config.Pos.size)
        vocab = hax.Axis("vocab", hf.vocab_size)
        template = abstract_module(config, vocab)
    except ConfigError:
        raise
    except Exception as error:  # Levanter and transformers raise anything for an odd configuration
        raise ConfigError(
            f"config.json: Levanter cannot express this {model_type} ({type(error).__name__}: {one_line(error)})"
        ) from error
    if position > positions:
        raise ConfigError(f"workload.position is {position}; the model has {positions} positions, use at most that")
    return Model(model_type, config, template, window, getattr(hf, "final_logit_softcapping", None))
