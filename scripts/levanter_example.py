"""python scripts/levanter_example.py --config_path scripts/levanter_example.yaml

A Levanter evaluation script that differs in one import, the marked line, from the same script for Levanter alone. With
that import every parameter streams directly into the sharding of `trainer.parameter_axis_mapping`. The `trainer:`
section of the configuration begins as `python -m shardplan.plan --config configs/tiny.yaml --mesh.replica 1` prints it.
Without accelerators, set JAX_PLATFORMS=cpu and JAX_NUM_CPU_DEVICES=8.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import haliax as hax
import jax
import jmp
import levanter
import numpy as np
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample, LmHeadModel, compute_next_token_loss
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
    levanter.initialize(config)
    trainer = config.trainer
    converter = HFCheckpointConverter(LlamaConfig, reference_checkpoint=config.hf_checkpoint)
    model_config = converter.default_config
    with trainer.use_device_mesh(), hax.axis_mapping(trainer.parameter_axis_mapping):
        model = converter.load_pretrained(model_config.model_type, dtype=trainer.mp.param_dtype)
        examples = first_batch(config, converter, hax.Axis(trainer.batch_axis, trainer.eval_batch_size))
        loss = hax.named_jit(mean_loss, axis_resources=trainer.compute_axis_mapping)(model, examples, trainer.mp)
        print(f"loss per token: {float(loss):.4f}")


def mean_loss(model: LmHeadModel, example: LmExample, policy: jmp.Policy) -> jax.Array:
    """Return the mean next-token loss in nats, a scalar."""
    # Levanter's own mean passes a float mask to jnp.mean, which JAX 0.10 refuses
    losses = compute_next_token_loss(policy.cast_to_compute(model), example, reduction=None)
    return (hax.sum(losses) / hax.sum(example.loss_mask)).scalar()


def first_batch(config: ExampleConfig, converter: HFCheckpointConverter, batch: hax.Axis) -> LmExample:
    """Return the first tokens of the first documents, int32[batch, position], and a mask of the tokens to predict."""
    position = converter.default_config.Pos
    tokens = np.zeros((batch.size, position.size), np.int32)
    present = np.zeros((batch.size, position.size), np.float32)
    for row, line in enumerate(Path(config.text).read_text().splitlines()[: batch.size]):
        ids = converter.tokenizer(json.loads(line)["text"])["input_ids"][: position.size]
        tokens[row, : len(ids)] = ids
        present[row, : len(ids) - 1] = 1  # the last token has no next one
    axes = (batch, position)
    return LmExample(tokens=hax.named(tokens, axes), loss_mask=hax.named(present, axes))


if __name__ == "__main__":
    levanter.config.main(main)()
