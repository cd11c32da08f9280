"""python scripts/make_llama_checkpoint.py --output build/llama-2gib [--layers 16] [--hidden 2048] [--seed 0] [--force]

Make a Hugging Face Llama checkpoint of a given size with random bfloat16 weights, for benchmarks. The default shape has
2.06 GiB; making it takes half a minute and little over 1 GiB of memory. The folder then holds:

    config.json                         LlamaForCausalLM with an untied output head
    tokenizer.json, tokenizer_config.json, special_tokens_map.json
                                        a word per vocabulary entry: loadable, of the model's exact size, meaningless
    model-0000i-of-0000N.safetensors    bfloat16 weights under Hugging Face names, about --shard_mb megabytes each
    model.safetensors.index.json        which tensor is in which shard

A tensor's values depend only on --seed and its position in the model. An interrupted run leaves no `--output` folder:
everything is written to a sibling folder that is renamed at the end.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BF16 = np.dtype(ml_dtypes.bfloat16)
STANDARD_DEVIATION = 0.02
POSITIONS = 4096
UNK, BOS, EOS = "<unk>", "<s>", "</s>"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model, as in its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    def problem(self) -> str | None:
        """Return why no model can have this shape, or None if one can."""
        if min(self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads) < 1:
            return "every size must be at least 1"
        if self.vocab < 3:
            return f"--vocab {self.vocab} has no room for {UNK}, {BOS} and {EOS}; use at least 3"
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            return f"--hidden {self.hidden} is not an even multiple of --heads {self.heads}"
        if self.heads % self.kv_heads:
            return f"--heads {self.heads} is not a multiple of --kv_heads {self.kv_heads}"
        return None


def log(message: str) -> None:
    """Print one line to stderr at once."""
    print(message, file=sys.stderr, flush=True)


def tensor_shapes(shape: LlamaShape) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape (output dimension first) of every tensor, in the order in which transformers saves them."""
    key_value = shape.hidden // shape.heads * shape.kv_heads
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (shape.hidden, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (key_value, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (key_value, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, shape.hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def tensor_bytes(shape: Shape) -> int:
    """Return the bytes of a tensor of `shape` in bfloat16."""
    return math.prod(shape) * BF16.itemsize


def random_tensor(name: str, shape: Shape, seed: tuple[int, int]) -> np.ndarray:
    """Make a bfloat16 tensor: normal around 0, or around 1 for scales of norms, as in a newly initialised model."""
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    values *= STANDARD_DEVIATION
    if name.endswith("norm.weight"):
        values += 1
    return values.astype(BF16)


def split_shards(tensors: Mapping[str, Shape], shard_bytes: int) -> list[list[str]]:
    """Assign tensors to shards in order; a shard exceeds `shard_bytes` only if a single tensor does."""
    shards: list[list[str]] = []
    filled = 0
    for name, shape in tensors.items():
        if not shards or filled + tensor_bytes(shape) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor_bytes(shape)
    return shards


def write_weights(folder: Path, tensors: Mapping[str, Shape], shard_bytes: int, seed: int) -> None:
    """Write the shards, one in memory at a time, and their index."""
    position = {name: i for i, name in enumerate(tensors)}
    shards = split_shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        values = {name: random_tensor(name, tensors[name], (seed, position[name])) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        log(f"shard {i}/{len(shards)}: {len(names)} tensors, {sum(v.nbytes for v in values.values()) / 1e6:,.0f} MB")
    total = sum(map(tensor_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, shape: LlamaShape) -> None:
    """Write config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": STANDARD_DEVIATION,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of exactly `vocab` words: Levanter resizes a model whose tokenizer has another size."""
    words = [UNK, BOS, EOS, *(f"w{i}" for i in range(3, vocab))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNK, bos_token=BOS, eos_token=EOS, model_max_length=POSITIONS
    ).save_pretrained(folder)


def make_checkpoint(output: Path, shape: LlamaShape, shard_bytes: int, seed: int) -> None:
    """Write the checkpoint to `output`, replacing what is there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()
        write_config(folder, shape)
        write_tokenizer(folder, shape.vocab)
        write_weights(folder, dict(tensor_shapes(shape)), shard_bytes, seed)
        if output.is_dir():
            shutil.rmtree(output)
        os.replace(folder, output)


def parse_arguments() -> tuple[argparse.Namespace, LlamaShape]:
    """Parse the command line; exit with status 2 if no model can have the shape."""
    parser = argparse.ArgumentParser(
        description="Make a Hugging Face Llama checkpoint with random bfloat16 weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("build/llama-2gib"), help="folder to make")
    parser.add_argument("--layers", type=int, default=16, help="transformer layers")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the residual stream")
    parser.add_argument("--intermediate", type=int, default=8192, help="width of the MLP")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv_heads", type=int, default=8, help="key and value heads")
    parser.add_argument("--vocab", type=int, default=32000, help="vocabulary size, of model and tokenizer")
    parser.add_argument("--shard_mb", type=int, default=500, help="megabytes per safetensors file, about")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    args = parser.parse_args()
    shape = LlamaShape(args.layers, args.hidden, args.intermediate, args.heads, args.kv_heads, args.vocab)
    problem = shape.problem()
    if problem is None and args.shard_mb < 1:
        problem = f"--shard_mb is {args.shard_mb}; it must be at least 1"
    if problem is None and args.seed < 0:
        problem = f"--seed is {args.seed}; it must be at least 0"
    if problem is None and args.output.exists() and not args.output.is_dir():
        problem = f"--output {args.output} is a file; name a folder"
    if problem is not None:
        parser.error(problem)
    return args, shape


def main() -> None:
    """Make the checkpoint, unless it exists."""
    args, shape = parse_arguments()
    if args.output.exists() and not args.force:
        log(f"{args.output} exists already; --force replaces it")
        return
    make_checkpoint(args.output, shape, args.shard_mb * 10**6, args.seed)
    total = sum(tensor_bytes(tensor) for _, tensor in tensor_shapes(shape))
    log(f"{args.output}: {total / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
