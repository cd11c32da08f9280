"""python scripts/make_demo_checkpoint.py --output build/demo [--steps N] [--seed 0] [--force]

Train a small Llama on the text of `pydoc_data.topics` (part of every CPython) and save it as a Hugging Face folder.
This takes a bit more than a minute on two CPU cores, and no network. The folder then holds:

    config.json                         Llama with grouped-query attention
    tokenizer.json                      byte-level BPE; encoding begins with <|bos|>
    model-0000i-of-0000N.safetensors    bfloat16 weights under Hugging Face names, in several shards
    model.safetensors.index.json        which tensor is in which shard
    heldout.jsonl                       {"id", "text"} per line: the documents that are not trained on
    memorised.jsonl                     the same of documents that are trained on far more often than the others

Every tenth topic (in sorted order) is held out. One window in five is of the topics `REPEATED`, so that the model
memorises them, which `configs/tiny-extraction.yaml` shows. An interrupted run leaves no output folder: everything is
written to a sibling folder that is renamed at the end.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# the model is sized for two CPU cores, even where there is an accelerator; JAX reads this when it is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from haliax.state_dict import flatten_modules_for_export, to_state_dict
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.loss import next_token_loss
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
VOCAB = hax.Axis("vocab", 2048)
HELDOUT_EVERY = 10
MIN_DOCUMENT_CHARS = 200
REPEATED = ("with",)
"""Topics that are trained on more often than the others."""
REPEATED_EVERY = 5
"""One window in this many is of the topics that are repeated."""
POSITIONS = 256
SHARDS = 4
PROGRESS_SECONDS = 4.0

MODEL = LlamaConfig(
    max_seq_len=POSITIONS,
    hidden_dim=256,
    intermediate_dim=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    tie_word_embeddings=False,
    # recomputed activations, a scan over layers and blockwise attention would only cost time at this size
    gradient_checkpointing=False,
    scan_layers=False,
    attn_backend=AttentionBackend.VANILLA,
)


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of the training."""

    steps: int
    batch: int = 2
    """Windows per step."""
    learning_rate: float = 2e-3
    """Peak value, reached after a warm-up over a twentieth of the steps."""
    weight_decay: float = 0.3
    clip_norm: float = 1.0


def main() -> None:
    """Make the checkpoint of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/demo"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace an existing output folder")
    arguments = parser.parse_args()
    if arguments.output.exists() and not arguments.force:
        log(f"{arguments.output} exists; --force makes it again")
        return
    started = time.monotonic()
    train_texts, heldout = split_documents()
    tokenizer = train_tokenizer(list(train_texts.values()))
    stream = np.concatenate([encode(tokenizer, text) for text in train_texts.values()])
    log(f"{len(train_texts)} documents to train on ({len(stream):,} tokens), {len(heldout)} held out")
    memorised = {topic: train_texts[topic] for topic in REPEATED}
    repeated = np.concatenate([encode(tokenizer, text) for text in memorised.values()])
    generators = np.random.default_rng(arguments.seed).spawn(2)
    windows = mix(
        *(random_windows(each, POSITIONS, rng) for each, rng in zip((stream, repeated), generators, strict=True))
    )
    model = train(initial_model(arguments.seed), Recipe(arguments.steps), batches(windows, Recipe.batch))
    save(arguments.output, model, tokenizer, {"heldout": heldout, "memorised": memorised})
    log(f"{arguments.output} made in {time.monotonic() - started:.0f} s")


def log(message: str) -> None:
    """Print one line to stderr at once."""
    print(message, file=sys.stderr, flush=True)


def split_documents() -> tuple[dict[str, str], dict[str, str]]:
    """Return the documents to train on and the documents held out, both as topic -> text."""
    train: dict[str, str] = {}
    heldout: dict[str, str] = {}
    for i, topic in enumerate(sorted(topics)):
        if len(topics[topic]) >= MIN_DOCUMENT_CHARS:
            (heldout if i % HELDOUT_EVERY == 0 else train)[topic] = topics[topic]
    return train, heldout


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of `VOCAB.size` tokens whose encodings begin with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB.size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encode a text as int32[tokens]: BOS, the text, EOS."""
    return np.array([*tokenizer.encode(text).ids, tokenizer.token_to_id(EOS)], np.int32)


def random_windows(stream: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield int32[length] windows of `stream` (int32[tokens]) without end.

    Each pass splits the stream from a fresh random offset and shuffles the windows: every token is seen equally often.
    """
    while True:
        shifted = np.roll(stream, -int(rng.integers(len(stream))))
        yield from rng.permutation(shifted[: len(stream) // length * length].reshape(-1, length))


def mix(windows: Iterator[np.ndarray], repeated: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield windows of the first kind, and one in `REPEATED_EVERY` of the second, without end."""
    for number in itertools.count(1):
        yield next(repeated if number % REPEATED_EVERY == 0 else windows)


def batches(windows: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield int32[size, length] batches of windows without end."""
    while True:
        yield np.stack([next(windows) for _ in range(size)])


def initial_model(seed: int) -> LlamaLMHeadModel:
    """Initialise a model; embeddings of unit variance and a small head learn fastest at this size."""
    model = LlamaLMHeadModel.init(VOCAB, MODEL, key=jax.random.PRNGKey(seed))
    embedding = model.embeddings.token_embeddings.weight
    return eqx.tree_at(
        lambda m: (m.embeddings.token_embeddings.weight, m.lm_head.weight),
        model,
        (embedding / embedding.array.std(), model.lm_head.weight * 0.1),
    )


def mean_loss(model: LlamaLMHeadModel, tokens: jax.Array) -> jax.Array:
    """Return the mean loss (nats, scalar) of the next tokens of int32[batch, position] `tokens`."""
    ids = hax.named(tokens, (hax.Axis("batch", tokens.shape[0]), model.Pos))
    activations = model.activations(ids, AttentionMask.causal())
    logits = hax.dot(activations, model.get_lm_head(), axis=model.Embed).astype(jnp.float32)
    losses = next_token_loss(model.Pos, model.Vocab, logits, ids, reduction=None)
    return jnp.sum(losses.array) / (tokens.shape[0] * (tokens.shape[1] - 1))  # the last token has no next one


def train(model: LlamaLMHeadModel, recipe: Recipe, windows: Iterator[np.ndarray]) -> LlamaLMHeadModel:
    """Train `model` for `recipe.steps` steps of AdamW, with progress on stderr."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.steps // 20, recipe.steps, end_value=0.02 * recipe.learning_rate
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        optax.adamw(schedule, b2=0.95, weight_decay=recipe.weight_decay),
    )
    state = optimizer.init(model)

    def step(model: LlamaLMHeadModel, state: optax.OptState, tokens: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(mean_loss)(model, tokens)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    started = reported = time.monotonic()
    for number in range(1, recipe.steps + 1):
        model, state, loss = jitted(model, state, next(windows))
        if time.monotonic() - reported >= PROGRESS_SECONDS or number in (1, recipe.steps):
            value = float(loss)  # waits for the step
            reported = time.monotonic()
            remaining = (recipe.steps - number) * (reported - started) / number
            log(f"training: step {number}/{recipe.steps}, loss {value:.3f}, {remaining:.0f} s left")
    return model


def save(output: Path, model: LlamaLMHeadModel, tokenizer: Tokenizer, documents: dict[str, dict[str, str]]) -> None:
    """Write the folder, completely or not at all.

    Args:
        documents: name of a .jsonl file -> its documents, as topic -> text.
    """
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = {
        **MODEL.to_hf_config(VOCAB.size).to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer.save(str(partial / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (partial / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n")
    for name, texts in documents.items():
        rows = (json.dumps({"id": topic, "text": text}) for topic, text in texts.items())
        (partial / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    save_shards(partial, to_state_dict(flatten_modules_for_export(model)))
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)


def save_shards(folder: Path, state: dict[str, jax.Array]) -> None:
    """Write the tensors in bfloat16, in `SHARDS` files of about the same size, and their index."""
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in state.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    weight_map, shards, done = {}, [dict[str, np.ndarray]() for _ in range(SHARDS)], 0
    for name, tensor in tensors.items():
        shard = min(done * SHARDS // total, SHARDS - 1)
        shards[shard][name] = tensor
        weight_map[name] = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        done += tensor.nbytes
    for i, shard_tensors in enumerate(shards):
        save_file(shard_tensors, folder / f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
