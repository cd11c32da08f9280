"""python scripts/levanter_example.py --config_path scripts/levanter_example.yaml

A Levanter evaluation script that differs in one import, the marked line, from the same script for Levanter alone. With
that import every parameter streams directly into the sharding of `trainer.parameter_axis_mapping`. The `trainer:`
section of the configuration begins as `shardplan plan --config configs/tiny.yaml --mesh.replica 1` prints it.
Without accelerators, set JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES=8.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.config
import levanter.trainer
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from levanter.models.loss import next_token_loss
from levanter.trainer import TrainerConfig

# from levanter.compat.hf_checkpoints import HFCheckpointConverter   # the import for Levanter alone
from shardplan import HFCheckpointConverter


@dataclass
class ExampleConfig:
    """The checkpoint and text to evaluate, and Levanter's trainer section."""

    hf_checkpoint: str = "build/demo"
    text: str = "build/demo/heldout.jsonl"
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def main(config: ExampleConfig) -> None:
    """Print the mean loss of the first batch of documents."""
    levanter.trainer.initialize(config)
    trainer = config.trainer
    converter = HFCheckpointConverter(LlamaConfig, reference_checkpoint=config.hf_checkpoint)
    model_config = converter.default_config
    with trainer.use_device_mesh(), hax.axis_mapping(trainer.parameter_axis_mapping):
        model = converter.load_pretrained(model_config.model_type, dtype=trainer.mp.param_dtype)
        tokens, weights = first_batch(config, converter, trainer.EvalBatch, model.Pos)
        compute_loss = hax.named_jit(mean_loss, axis_resources=trainer.compute_axis_mapping)
        loss = compute_loss(trainer.mp.cast_to_compute(model), tokens, weights)
        print(f"loss per token: {float(loss):.4f}")


def mean_loss(model: LmHeadModel, tokens: NamedArray, weights: NamedArray) -> jax.Array:
    """Return the mean loss of next tokens in nats, a scalar, for int32[batch, position] `tokens`."""
    activations = model.activations(tokens, AttentionMask.causal())
    logits = hax.dot(activations, model.get_lm_head(), axis=model.Embed).astype(jnp.float32)
    losses = next_token_loss(model.Pos, model.Vocab, logits, tokens, weights, reduction=None)
    return (hax.sum(losses) / hax.sum(weights)).scalar()


def first_batch(
    config: ExampleConfig, converter: HFCheckpointConverter, batch: hax.Axis, position: hax.Axis
) -> tuple[NamedArray, NamedArray]:
    """Return the first tokens of the first documents, int32[batch, position], and 1.0 for those with a next token."""
    tokens = np.zeros((batch.size, position.size), np.int32)
    weights = np.zeros((batch.size, position.size), np.float32)
    for row, line in enumerate(Path(config.text).read_text().splitlines()[: batch.size]):
        ids = converter.tokenizer(json.loads(line)["text"])["input_ids"][: position.size]
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids) - 1] = 1
    return hax.named(tokens, (batch, position)), hax.named(weights, (batch, position))


if __name__ == "__main__":
    levanter.config.main(main)()
