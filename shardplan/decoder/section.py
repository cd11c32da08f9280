"""The section `model` of a Levanter configuration whose model is a decoder: `type: shardplan_decoder`.

A `DecoderConfig` is made from a config.json, so the section names one. Levanter's parser calls `DecoderSection` with
the keys of a YAML file or of the command line; `__new__` returns the `DecoderConfig` that they describe.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import draccus
from haliax.nn.scan import ScanCheckpointPolicy
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmConfig

from shardplan.decoder.config import DecoderConfig
from shardplan.decoder.layers.expert_layers import has_experts
from shardplan.decoder.layers.sparse_layers import check_has_selection, selected_method, with_selected_method
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import check_config, read_config
from shardplan.model.huggingface.text_part import read_text_part
from shardplan.storage import open_folder

SECTION_TYPE = "shardplan_decoder"
"""Value of the section's key `type`."""


@LmConfig.register_subclass(SECTION_TYPE)
@dataclass(frozen=True)
class DecoderSection(LmConfig):
    """The keys of the section; a call of the class returns the `DecoderConfig` that they describe.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> DecoderSection(hf_config={"model_type": "granite", "vocab_size": 256, **sizes}, max_seq_len=1024).max_seq_len
    1024
    """

    reference_checkpoint: str | None = None
    """Hugging Face checkpoint of the tokenizer and weights, and of the config.json if `hf_config` is not given."""
    hf_config: dict[str, Any] | str | None = None
    """The keys of a config.json, the path of a config.json, or the name of a bundled model."""
    max_seq_len: int | None = None
    """Number of positions; default and maximum: the positions of the model."""
    attn_backend: AttentionBackend | None = None
    """Levanter's attention backend, for attention that no plan computes."""
    flash_attention_block_size: int | None = None
    gradient_checkpointing: bool | ScanCheckpointPolicy | str = True
    expert_statistics: bool = False
    """Log statistics of routed experts at every step of training, as `train/moe/layer_00/load_max_over_mean`."""
    selected_method: SelectedMethod | None = None
    """How Native Sparse Attention attends to selected blocks; default: with a dense mask."""
    selection_statistics: bool = False
    """Log which blocks Native Sparse Attention selects at every training step, as `train/nsa/layer_00/k_mean`."""

    def __new__(cls, **given: Any) -> DecoderConfig:
        """Make the configuration that the keys describe.

        Raises:
            ConfigError: there is no config.json, or the decoder has no family for it; `max_seq_len` is more positions
                than the model has; or a key is set for routed experts or Native Sparse Attention, and the model has
                none.
        """
        keys = {field.name: given.get(field.name, field.default) for field in dataclasses.fields(cls)}
        reference, positions = keys["reference_checkpoint"], keys.pop("max_seq_len")
        config = DecoderConfig.from_hf_config(_read_keys(keys.pop("hf_config"), reference))
        if positions is not None and not 0 < positions <= config.max_seq_len:
            raise ConfigError(
                f"model.max_seq_len is {positions}, and the model has {config.max_seq_len} positions; use at most that"
            )
        if keys["expert_statistics"] and not has_experts(config.segments):
            raise ConfigError(
                f"model.expert_statistics is true, and a {config.family} of this config.json has no routed experts; "
                "leave it out"
            )
        if keys["selection_statistics"]:
            check_has_selection("model.selection_statistics", config)
        method = keys.pop("selected_method")
        if method is not None:
            if selected_method(config.segments) is None:
                raise ConfigError(
                    f"model.selected_method is {method}, and a {config.family} has no native sparse attention; leave "
                    "it out"
                )
            keys["segments"] = with_selected_method(config.segments, SelectedMethod(method))
        return dataclasses.replace(config, max_seq_len=positions or config.max_seq_len, **keys)


def _read_keys(hf_config: Mapping[str, Any] | str | None, reference: str | None) -> dict[str, Any]:
    """Return the keys of the config.json that a section contains or names.

    Raises:
        ConfigError: the section names no config.json, or one that cannot be used.
    """
    if isinstance(hf_config, str):
        return read_config(hf_config, None)
    if hf_config is None:
        if reference is None:
            raise ConfigError(
                f"model: a {SECTION_TYPE} needs reference_checkpoint, a Hugging Face checkpoint, or hf_config, the "
                "keys of a config.json"
            )
        return read_config(None, open_folder(reference))
    if not isinstance(hf_config.get("model_type"), str):
        raise ConfigError("model.hf_config has no model_type; give the keys of the model's config.json")
    return check_config(*read_text_part({**hf_config}, "model.hf_config"))


def _encode(config: DecoderConfig) -> dict[str, Any]:
    """Convert a configuration to its section, which Levanter writes to its logs."""
    policy, method = config.gradient_checkpointing, selected_method(config.segments)
    return {
        "type": SECTION_TYPE,
        "reference_checkpoint": config.reference_checkpoint,
        "hf_config": json.loads(config.hf_config),
        "max_seq_len": config.max_seq_len,
        "attn_backend": None if config.attn_backend is None else config.attn_backend.value,
        "flash_attention_block_size": config.flash_attention_block_size,
        "gradient_checkpointing": dataclasses.asdict(policy) if isinstance(policy, ScanCheckpointPolicy) else policy,
        "expert_statistics": config.expert_statistics,
        # `selected_method` is refused for any other model
        **({} if method is None else _selection_keys(config, method)),
    }


def _selection_keys(config: DecoderConfig, method: SelectedMethod) -> dict[str, Any]:
    """Return the section's keys that only models with Native Sparse Attention have."""
    return {"selected_method": method.value, "selection_statistics": config.selection_statistics}


draccus.encode.register(DecoderConfig, lambda config, declared=None: _encode(config))
