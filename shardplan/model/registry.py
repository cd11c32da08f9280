"""Which Hugging Face model types there are, and the Levanter model that each becomes."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from levanter.layers.attention import Attention

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model.levanter_compat import CORRECTIONS, prepare_hf_config, rotary_scaling
from shardplan.positions.pattern import Pattern

SUPPORTED = {
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

UNIFORM_WINDOW = ("mistral", "mixtral")
"""Types whose `sliding_window` holds in every layer, so that one attention mask expresses it."""


@dataclass(frozen=True, eq=False)
class Model:
    """A Levanter model that has its shapes and no weights."""

    type: str
    """Hugging Face `model_type`."""
    config: Any
    """Levanter's configuration (an `HFCompatConfig`)."""
    template: Any
    """The Levanter module, with `jax.ShapeDtypeStruct`s in place of arrays."""
    sliding_window: int | None
    """Width in tokens of the attention window, where every layer has one."""
    logit_soft_cap: float | None
    """Bound of the logits, applied as `cap * tanh(logits / cap)` (Gemma 2)."""

    @property
    def shares_attention(self) -> bool:
        """Whether its attention is the class that Levanter's models share, rather than one of its own."""
        leaves = jax.tree.leaves(self.template, is_leaf=lambda node: isinstance(node, Attention))
        return any(isinstance(leaf, Attention) for leaf in leaves)

    @property
    def pattern(self) -> Pattern:
        """What a token may attend to."""
        return Pattern(causal=True, window=self.sliding_window)

    @property
    def vocab(self) -> hax.Axis:
        """The vocabulary axis."""
        return self.template.Vocab


def build_model(hf_config: dict[str, Any], position: int) -> Model:
    """The Levanter model that a Hugging Face configuration describes, for sequences of `position` tokens.

    Raises:
        ConfigError: an unsupported model type, a configuration that Levanter's model does not express, or more
            positions than the model has.
    """
    from transformers import AutoConfig

    model_type = hf_config["model_type"]
    if model_type not in SUPPORTED:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; {nearest(str(model_type), SUPPORTED)} "
            f"(supported: {', '.join(sorted(SUPPORTED))})"
        )
    try:
        hf = prepare_hf_config(AutoConfig.for_model(**hf_config))
        module, name = SUPPORTED[model_type]
        config = getattr(import_module(module), name).from_hf_config(hf)
        for correct in (rotary_scaling, *CORRECTIONS.get(model_type, ())):
            config = correct(config, hf)
        window = _sliding_window(model_type, hf, position)
        positions = int(config.Pos.size)
        vocab = hax.Axis("vocab", hf.vocab_size)
        template = eqx.filter_eval_shape(config.model_type.init, vocab, config, key=jax.random.PRNGKey(0))
    except ConfigError:
        raise
    except Exception as error:  # whatever Levanter and transformers make of an odd configuration
        raise ConfigError(
            f"config.json: Levanter cannot express this {model_type} ({type(error).__name__}: {one_line(error)})"
        ) from error
    if position > positions:
        raise ConfigError(f"workload.position is {position}; the model has {positions} positions, use at most that")
    return Model(model_type, config, template, window, getattr(hf, "final_logit_softcapping", None))


def _sliding_window(model_type: str, hf: Any, position: int) -> int | None:
    """The window that a mask must impose; None where attention sees all `position` tokens anyway."""
    window = getattr(hf, "sliding_window", None)
    if window is None or window >= position or not getattr(hf, "use_sliding_window", True):
        return None
    if model_type in UNIFORM_WINDOW:
        return window
    raise ConfigError(
        f"workload.position is {position}; some layers of {model_type} attend to {window} tokens only, which "
        f"Levanter's model does not do; use at most {window}"
    )
