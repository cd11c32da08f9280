"""Corrects differences between Levanter's models and the Hugging Face models of the same name.

After an upgrade of Levanter or transformers, revise every entry here; tests/unit/test_hf_config.py and
tests/golden/test_logits.py check each of them. (How Levanter writes configuration files is in
`shardplan.levanter_config`.) Imports no JAX, as the modules that read configurations must not.
"""

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from shardplan.errors import ConfigError

LEVANTER_PACKAGES = ("marin-haliax", "marin-levanter")
"""Packages that install the modules `haliax` and `levanter`."""

CHECKPOINT_MODEL = "model"
"""Name of the model within Levanter's checkpoints."""
CHECKPOINT_FILES = ("d/", "manifest.json", "manifest.ocdbt")
"""Files and folders (with a final `/`) that hold the arrays in Levanter's checkpoints of a model."""

LIBTPU_RELEASE = "0.0.48"
"""The release of libtpu that belongs to JAX 0.11, as pinned in pyproject.toml."""

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new", "gelu_accurate": "gelu_new", "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu",
    "swish": "silu", "tanh": "tanh",
}  # fmt: skip
"""Name of an activation function in transformers -> its name in Levanter."""
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
"""Names of GELU approximated by tanh."""
ACTIVATION_KEYS = {
    "gemma2": "hidden_activation", "gpt2": "activation_function", "llama": "hidden_act", "mistral": "hidden_act",
    "mixtral": "hidden_act", "olmo2": "hidden_act", "qwen2": "hidden_act", "qwen3": "hidden_act",
}  # fmt: skip
"""Model type -> the key of its activation function; Gemma's activation function is fixed."""

FIXED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    # transformers reads "gelu" as its approximation here, as Gemma was trained
    "gemma": {"attention_bias": (False,), "hidden_act": ("gelu", *TANH_GELU), "hidden_activation": TANH_GELU},
    "gemma2": {"attention_bias": (False,)},
    "gpt2": {"scale_attn_weights": (True,)},
    "llama": {"attention_bias": (False,), "mlp_bias": (False,)},
    "olmo2": {"attention_bias": (False,)},
    "qwen3": {"attention_bias": (False,)},
}
"""Model type -> key that transformers reads and Levanter ignores -> the values for which Levanter's model is right."""

UNIFORM_WINDOW_TYPES = ("mistral", "mixtral")
"""Model types with `sliding_window` in every layer."""
LAYER_WINDOW_TYPES = ("gemma2", "qwen2", "qwen3")
"""Model types with `sliding_window` in the layers that `layer_types` calls "sliding_attention"."""


def prepare_hf_config(hf: Any) -> Any:
    """Set the attributes of the transformers configuration `hf` that Levanter reads.

    Raises:
        ConfigError: Levanter's model has another MLP size, or numbers of heads are not divisible.
    """
    hf.rope_theta, _ = rope_of(hf)  # GemmaConfig reads this attribute, which transformers 5 does not set
    _check_heads(hf)
    if hf.model_type == "gemma":
        hf.hidden_activation = "gelu_pytorch_tanh"  # an attribute that transformers 5 does not set
    else:
        key = ACTIVATION_KEYS[hf.model_type]
        setattr(hf, key, ACTIVATIONS[getattr(hf, key)])
    if hf.model_type == "qwen2":
        # QwenConfig.from_hf_config reads `no_bias`, which Qwen2Config never had. Qwen 2 has biases on q, k and v
        # (QwenConfig.attention_config adds those by itself) and none elsewhere.
        hf.no_bias = True
    if hf.model_type == "gpt2" and hf.n_inner not in (None, 4 * hf.n_embd):
        raise ConfigError(
            f"config.json: n_inner is {hf.n_inner}; Levanter's GPT-2 supports only 4 x n_embd = {4 * hf.n_embd}"
        )
    return hf


def _check_heads(hf: Any) -> None:
    """Check that key heads divide query heads, and that heads divide the hidden size.

    Raises:
        ConfigError: one of these does not divide the other.
    """
    heads, groups = hf.num_attention_heads, getattr(hf, "num_key_value_heads", None)
    if groups is not None and heads % groups:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads}, which num_key_value_heads = {groups} does not divide"
        )
    if getattr(hf, "head_dim", None) is None and hf.hidden_size % heads:
        raise ConfigError(f"config.json: the hidden size {hf.hidden_size} is not divisible by {heads} attention heads")


def correct_levanter_config(config: Any, hf: Any) -> Any:
    """Apply all corrections for the model type to the Levanter configuration `config`, which was read from `hf`.

    Raises:
        ConfigError: Levanter's model cannot express what `hf` says.
    """
    for correct in (_apply_rope_scaling, _leave_windows_to_mask, *CORRECTIONS.get(hf.model_type, ())):
        config = correct(config, hf)
    return config


def sliding_window(hf: Any, position: int) -> int | None:
    """Return the window, in tokens, that the attention mask needs; None if it would exclude none of `position` tokens.

    Raises:
        ConfigError: only some layers have the window.
    """
    window = getattr(hf, "sliding_window", None)
    if window is None or window >= position:
        return None
    if hf.model_type in UNIFORM_WINDOW_TYPES:
        return window
    if hf.model_type not in LAYER_WINDOW_TYPES:
        return None  # transformers ignores the key
    layers = hf.num_hidden_layers
    windowed = sum(kind == "sliding_attention" for kind in hf.layer_types[:layers])
    if 0 < windowed < layers:
        raise ConfigError(
            f"workload.position is {position}; {windowed} of {layers} layers of this {hf.model_type} attend to "
            f"{window} tokens only (sliding_window), and Levanter's model has the same window in all layers; use at "
            f"most {window}"
        )
    return window if windowed else None


def has_windows(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a config.json has layers with a window that is smaller than the model's number of positions."""
    window, model_type = hf_config.get("sliding_window"), hf_config["model_type"]
    positions = hf_config.get("max_position_embeddings")
    if model_type not in (*UNIFORM_WINDOW_TYPES, *LAYER_WINDOW_TYPES) or window is None:
        return False
    if model_type.startswith("qwen") and not hf_config.get("use_sliding_window", False):
        return False
    return positions is None or window < positions


def rope_of(hf: Any) -> tuple[float | None, dict[str, Any] | None]:
    """Return the base and the scaling of a model's rotary frequencies; either is None if the model has none."""
    parameters = getattr(hf, "rope_parameters", None)  # transformers 5
    if not parameters:
        return getattr(hf, "rope_theta", None), getattr(hf, "rope_scaling", None)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return parameters["rope_theta"], None if scaling.get("rope_type", "default") == "default" else scaling


def _apply_rope_scaling(config: Any, hf: Any) -> Any:
    """Set `rope`, because Mistral and Mixtral configurations drop the scaling, and Levanter's YaRN differs."""
    theta, scaling = rope_of(hf)
    if scaling is None or not hasattr(config, "rope"):
        return config
    if scaling["rope_type"] == "yarn":
        yarn = import_module("shardplan.model.corrections.rotary").YarnConfig
        return dataclasses.replace(config, rope=yarn.make_from_hf_config(theta, scaling))
    rotary = import_module("levanter.layers.rotary")
    return dataclasses.replace(config, rope=rotary.RotaryEmbeddingsConfig.from_hf_config(theta, scaling))


def _leave_windows_to_mask(config: Any, hf: Any) -> Any:
    """Unset `use_sliding_window`: the mask applies the window, and Qwen's layers would refuse longer sequences."""
    return dataclasses.replace(config, use_sliding_window=False) if hasattr(config, "use_sliding_window") else config


def _apply_head_dim(config: Any, hf: Any) -> Any:
    """Set `head_dim`, which Levanter's Llama, Mistral and Qwen 2 drop even if it is not hidden size / heads."""
    head_dim = getattr(hf, "head_dim", None)
    if head_dim is None or head_dim == config.attention_config().head_size:
        return config
    if not hasattr(config, "head_dim"):
        raise ConfigError(
            f"config.json: head_dim is {head_dim}; Levanter's {hf.model_type} supports only hidden size / heads = "
            f"{config.attention_config().head_size}"
        )
    config = dataclasses.replace(config, head_dim=head_dim)
    if head_dim == config.attention_config().head_size:
        return config

    # configurations of Mistral, Mixtral and Qwen 2 have the field, but do not pass it to attention
    base = type(config)

    def attention_config(self: Any) -> Any:
        return dataclasses.replace(base.attention_config(self), head_dim=self.head_dim)

    return _with_methods(config, {"attention_config": attention_config})


def _apply_tied_head(config: Any, hf: Any) -> Any:
    """Use Levanter's Llama for a Mistral with a tied output head, because Levanter's equal Mistral cannot tie heads."""
    if not hf.tie_word_embeddings:
        return config
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    tied_model = import_module("levanter.models.llama").LlamaLMHeadModel
    return _with_methods(tied, {"model_type": property(lambda _: tied_model)})


def _with_methods(config: Any, methods: dict[str, Any]) -> Any:
    """Return a copy of a configuration in which `methods` replace methods of its class."""
    base = type(config)
    corrected = type(base.__name__, (base,), methods)
    return corrected(**{item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init})


def _apply_gemma_attention(config: Any, hf: Any) -> Any:
    """Pass `head_dim`, the scale of scores and the soft cap to attention, because Gemma configurations do not."""
    base = type(config)
    has_caps = hf.model_type == "gemma2"  # transformers ignores these keys in a Gemma

    def attention_config(self: Any) -> Any:
        return dataclasses.replace(
            base.attention_config(self),
            head_dim=self.head_dim,
            scaling_factor=float(hf.query_pre_attn_scalar if has_caps else hf.head_dim) ** -0.5,
            logits_soft_cap=hf.attn_logit_softcapping if has_caps else None,
        )

    return _with_methods(config, {"attention_config": attention_config})


def _apply_gemma2_limits(config: Any, hf: Any) -> Any:
    """Set the soft caps and the window, because Levanter uses its defaults instead of the config.json."""
    return dataclasses.replace(
        config,
        final_logit_softcapping=hf.final_logit_softcapping,
        attn_logit_softcapping=hf.attn_logit_softcapping,
        sliding_window=hf.sliding_window,
    )


CORRECTIONS: dict[str, tuple[Callable[[Any, Any], Any], ...]] = {
    "gemma": (_apply_gemma_attention,),
    "gemma2": (_apply_gemma_attention, _apply_gemma2_limits),
    "llama": (_apply_head_dim,),
    "mistral": (_apply_head_dim, _apply_tied_head),
    "mixtral": (_apply_head_dim,),
    "olmo2": (_apply_head_dim,),
    "qwen2": (_apply_head_dim,),
}
"""Hugging Face `model_type` -> corrections of the Levanter configuration, in order."""
