"""The Levanter configuration of a decoder, which the family of its model type reads from a config.json.

To an `Architecture` it adds what Levanter's Trainer and checkpoint converter call: the class of the model, counts of
FLOPs and parameters, and conversions from and to the configurations of transformers.
"""

import json
from dataclasses import dataclass
from typing import Any

from haliax import Axis
from levanter.compat.hf_checkpoints import HFCheckpointConverter, HFCompatConfig

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families import FAMILIES
from shardplan.decoder.model import Decoder
from shardplan.errors import ConfigError, nearest
from shardplan.model.huggingface.text_part import read_text_part
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import abstract_module, transformers_config


@dataclass(frozen=True)
class DecoderConfig(Architecture, HFCompatConfig):
    """A Levanter configuration whose model is a `Decoder`.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> config = DecoderConfig.from_hf_config({"model_type": "granite", "vocab_size": 256, **sizes})
    >>> config.embed, config.segments[0].repeats
    (64, 2)
    """

    reference_checkpoint: str | None = None
    """The checkpoint from which Levanter reads tokenizer and weights by default."""

    @property
    def model_type(self) -> type[Decoder]:
        """The class of the model."""
        return Decoder

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> "DecoderConfig":
        """Make the configuration from a config.json, given as a mapping or as a transformers configuration.

        Raises:
            ConfigError: a value is not valid, or the family of the `model_type` does not understand a key.
        """
        given = hf_config if isinstance(hf_config, dict) else hf_config.to_dict()
        values, where = (
            read_text_part(given, "config.json") if isinstance(given.get("model_type"), str) else (given, "")
        )
        keys = ConfigKeys(values, where or "config.json")
        kind = values.get("model_type")
        if kind not in FAMILIES:
            raise ConfigError(f"config.json: the decoder has no model_type {kind!r}; {nearest(str(kind), FAMILIES)}")
        keys.integer("vocab_size")  # checked only: Levanter passes the vocabulary as another argument
        fields = FAMILIES[kind].read(keys)
        keys.finish()
        return cls(**fields, hf_config=json.dumps(values, sort_keys=True))

    def flops_per_token(self, vocab_size: int, context_length: int) -> int:
        """Count the FLOPs of a token's forward pass, from which Levanter's trainer computes the MFU it logs.

        Args:
            vocab_size: tokens of the vocabulary.
            context_length: tokens of a text.
        """
        token_embed = self.TokenEmbed.size
        flops = 2 * token_embed * vocab_size
        if self.token_embed is not None:
            flops += 2 * 2 * token_embed * self.embed
        for segment in self.segments:
            for layer in segment.layers:
                attention = layer.attention.flops_per_token(self.embed, context_length)
                flops += segment.repeats * (attention + layer.mlp.flops_per_token(self.embed))
        return flops

    def total_trainable_params(self, vocab_size: int) -> int:
        """Count the elements of all parameters, for a vocabulary of `vocab_size` tokens."""
        leaves = named_leaves(abstract_module(self, Axis("vocab", vocab_size)))
        return sum(leaf.size for _, leaf in leaves)

    def to_hf_config(self, vocab_size: int, config_overrides: dict[str, Any] | None = None) -> Any:
        """Return the original config.json as a transformers configuration, with `vocab_size` tokens.

        Args:
            config_overrides: further keys to change.
        """
        values = {**json.loads(self.hf_config), "vocab_size": vocab_size, **(config_overrides or {})}
        return transformers_config(values)

    def hf_checkpoint_converter(self, ref_checkpoint: str | None = None) -> HFCheckpointConverter:
        """Return Levanter's converter for checkpoints of this family.

        Args:
            ref_checkpoint: the checkpoint from which it reads tokenizer and configuration; default:
                `reference_checkpoint`.
        """
        return HFCheckpointConverter(
            type(self),
            reference_checkpoint=ref_checkpoint or self.reference_checkpoint,
            HfConfigClass=type(self.to_hf_config(1)),
            ignore_prefix=None,
        )
