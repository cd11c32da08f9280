"""python scripts/make_demo_checkpoint.py --output build/demo [--steps N] [--seed 0] [--force]

Train a small Llama on the text of `pydoc_data.topics` (part of every CPython) and save it as a Hugging Face folder.
It needs two CPU cores, about a minute, and no network. The folder then holds:

    config.json                         Llama with grouped-query attention, sizes divisible by 8 where it matters
    tokenizer.json, tokenizer_config.json, special_tokens_map.json
                                        byte-level BPE; encoding prepends <|bos|>
    model-0000i-of-0000N.safetensors    bfloat16 weights under Hugging Face names, in several shards
    model.safetensors.index.json        which tensor is in which shard
    heldout.jsonl                       {"id", "text"} per line: the documents that were never trained on

Every tenth topic (in sorted order) is held out, so what is trained on depends on the Python version and nothing else.
An interrupted run leaves no `--output` folder: everything is written to a sibling folder that is renamed at the end.
"""

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# The demo is sized for two CPU cores and must not depend on the accelerator that happens to be there.
# jax reads this when it is imported, hence before the imports below.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis, NamedArray
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.loss import maybe_fused_next_token_loss
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB_SIZE = 2048
MIN_DOCUMENT_CHARS = 200
HELDOUT_EVERY = 10
NUM_SHARDS = 4
PROGRESS_SECONDS = 4.0


@dataclass(frozen=True)
class Recipe:
    """How long and how hard to train. Chosen so that two cores need about a minute."""

    steps: int = 600
    batch_size: int = 8  # windows per step
    peak_learning_rate: float = 3e-3
    warmup_fraction: float = 0.05
    weight_decay: float = 0.1
    clip_norm: float = 1.0


MODEL = LlamaConfig(
    seq_len=256,
    hidden_dim=128,
    intermediate_dim=384,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    tie_word_embeddings=False,
    # Activations of this model are small: recomputing them would only cost time.
    gradient_checkpointing=False,
    # The blockwise attention that levanter picks on CPU is slower than the plain one at this length.
    attn_backend=AttentionBackend.VANILLA,
)


def log(message: str) -> None:
    """Print one line to stderr at once."""
    print(message, file=sys.stderr, flush=True)


def split_documents() -> tuple[dict[str, str], dict[str, str]]:
    """Return (training, held-out) documents as {topic: text}; the split depends on the sorted topic names only."""
    train: dict[str, str] = {}
    heldout: dict[str, str] = {}
    for i, topic in enumerate(sorted(topics)):
        if len(topics[topic]) >= MIN_DOCUMENT_CHARS:
            (heldout if i % HELDOUT_EVERY == 0 else train)[topic] = topics[topic]
    return train, heldout


def train_tokenizer(documents: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer whose encodings start with BOS.

    `max_length` (tokens) is only recorded as the model's context length; nothing is truncated by default.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_document(tokenizer: PreTrainedTokenizerFast, text: str) -> np.ndarray:
    """Return the int32[tokens] ids of one document: BOS, the text, EOS."""
    return np.array([*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id], dtype=np.int32)


def random_windows(stream: np.ndarray, batch_size: int, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield int32[batch_size, length] batches of windows of `stream` (int32[tokens]), for ever.

    Each pass cuts the stream at a fresh random offset and shuffles the pieces. Unlike independent draws, this shows
    every token equally often, which matters when there is time for a few passes only.
    """
    pending = np.empty((0, length), dtype=np.int32)
    while True:
        while len(pending) < batch_size:
            shifted = np.roll(stream, -int(rng.integers(len(stream))))
            pieces = shifted[: len(stream) // length * length].reshape(-1, length)
            pending = np.concatenate([pending, rng.permutation(pieces)])
        yield pending[:batch_size]
        pending = pending[batch_size:]


def heldout_windows(documents: list[np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut held-out documents into windows that predict each token after BOS exactly once.

    Returns int32[windows, length] tokens and float32[windows, length] masks; mask[i, j] is 1 where the prediction made
    at position j (of token j + 1) counts. A window never crosses documents and starts with the last token of the one
    before it.
    """
    rows: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for document in documents:
        for start in range(0, len(document) - 1, length - 1):
            piece = document[start : start + length]
            rows.append(np.pad(piece, (0, length - len(piece))))
            masks.append((np.arange(length) < len(piece) - 1).astype(np.float32))
    return np.stack(rows), np.stack(masks)


def unigram_loss(tokens: np.ndarray, mask: np.ndarray) -> float:
    """Entropy (nats per token) of the predicted held-out tokens: the best that a model without context could do."""
    targets = np.roll(tokens, -1, axis=1)[mask > 0]
    counts = np.bincount(targets)
    shares = counts[counts > 0] / len(targets)
    return float(-(shares * np.log(shares)).sum())


def mean_loss(model: LlamaLMHeadModel, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean next-token loss (nats, scalar) over int32[batch, position] `tokens` where float32 `mask` (same shape) is 1."""
    ids = hax.named(tokens, (Axis("batch", tokens.shape[0]), model.Pos))
    losses = maybe_fused_next_token_loss(
        model.Pos,
        model.Embed,
        model.Vocab,
        model.activations(ids, AttentionMask.causal()),
        model.get_lm_head(),
        ids,
        # levanter's own mean hands a float mask to jnp.mean, which current jax refuses.
        reduction=None,
    )
    per_token = losses.rearrange(ids.axes).array
    return jnp.sum(per_token * mask) / jnp.sum(mask)


def evaluate(model: LlamaLMHeadModel, tokens: np.ndarray, mask: np.ndarray, batch_size: int) -> float:
    """Mean loss (nats per counted token) over [windows, position] `tokens` and `mask`."""
    loss_fn = jax.jit(mean_loss)
    # One shape means one compilation: fill the last batch with windows that count for nothing.
    missing = -len(tokens) % batch_size
    tokens = np.pad(tokens, ((0, missing), (0, 0)))
    mask = np.pad(mask, ((0, missing), (0, 0)))
    total = 0.0
    for start in range(0, len(tokens), batch_size):
        part = slice(start, start + batch_size)
        total += float(loss_fn(model, tokens[part], mask[part])) * float(mask[part].sum())
    return total / float(mask.sum())


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping, warmup and cosine decay to a tenth of the peak over `recipe.steps` steps."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=recipe.peak_learning_rate,
        warmup_steps=max(1, round(recipe.steps * recipe.warmup_fraction)),
        decay_steps=max(2, recipe.steps),
        end_value=0.02 * recipe.peak_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay),
    )


def train(model: LlamaLMHeadModel, recipe: Recipe, batches: Iterator[np.ndarray]) -> LlamaLMHeadModel:
    """Train `model` on `recipe.steps` int32[batch, position] batches and return it, logging progress to stderr."""
    optimizer = make_optimizer(recipe)
    state = optimizer.init(model)

    def step_fn(model, state, tokens):
        # The last position of a window has no next token.
        mask = jnp.ones(tokens.shape, jnp.float32).at[:, -1].set(0.0)
        loss, grads = jax.value_and_grad(mean_loss)(model, tokens, mask)
        updates, state = optimizer.update(grads, state, model)
        return optax.apply_updates(model, updates), state, loss

    jitted_step = jax.jit(step_fn, donate_argnums=(0, 1))
    started = last_report = time.monotonic()
    last_step = 0
    for step in range(1, recipe.steps + 1):
        tokens = next(batches)
        model, state, loss = jitted_step(model, state, tokens)
        now = time.monotonic()
        if now - last_report >= PROGRESS_SECONDS or step in (1, recipe.steps):
            value = float(loss)  # waits for the step, so the clock is read again
            now = time.monotonic()
            rate = (step - last_step) * tokens.size / (now - last_report)
            elapsed = now - started
            eta = (recipe.steps - step) * elapsed / step
            log(
                f"step {step}/{recipe.steps}  loss {value:.3f}  {rate:,.0f} tokens/s  "
                f"elapsed {elapsed:.0f}s  ETA {eta:.0f}s"
            )
            last_report, last_step = now, step
    return model
