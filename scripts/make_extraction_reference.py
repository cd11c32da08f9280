"""python scripts/make_extraction_reference.py: windows scored by transformers in float64, for tests/golden/extraction.

Needs torch, which shardplan does not. It shares nothing with shardplan but the checkpoints, texts and tokenizer:
windows, probabilities, ranks and coverage are computed one by one, as the protocol says. The results at other
temperatures, and with a token of the beginning in the prefix, are in settings/.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FOLDER = GOLDEN / "extraction"
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral", "qwen3")
PREFIX, SUFFIX, TOP_K = 10, 6, 40
STRIDES = {"tokens": 3, "characters": 17}
SETTING_FAMILIES = ("llama", "gemma2")
TEMPERATURES = (0.7, 1.0, 2.0)
BOS_STRIDE = 29
"""Tokens between the windows whose prefix has a token of the beginning, or has none."""
THRESHOLDS = (0.001, 0.01, 0.1, 0.5, 0.75)


def main() -> None:
    """Train the tokenizer if there is none, and write the scores of every family."""
    texts = {path.name: path.read_bytes().decode() for path in sorted((FOLDER / "texts").iterdir())}
    if not (FOLDER / "tokenizer.json").exists():
        train_tokenizer(list(texts.values()))
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(
            GOLDEN / "data" / family, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        arrays, coverage = {}, {}
        for unit, stride in STRIDES.items():
            rows = []
            for name, text in texts.items():
                windows = (by_tokens if unit == "tokens" else by_characters)(tokenizer, text, stride)
                own = [(*span, *score(model, ids)) for span, ids in windows]
                coverage[f"{unit} {name}"] = covered(len(text), own)
                rows += [(name, *row) for row in own]
            arrays[f"{unit} text"] = np.array([row[0] for row in rows])
            for i, column in enumerate(("start", "end", "log_prob", "rank", "top_log_prob"), start=1):
                arrays[f"{unit} {column}"] = np.array([row[i] for row in rows])
        np.savez_compressed(FOLDER / f"{family}.npz", **arrays)
        (FOLDER / f"{family}.json").write_text(json.dumps(coverage, indent=1) + "\n")
        if family in SETTING_FAMILIES:
            (FOLDER / "settings").mkdir(exist_ok=True)
            np.savez_compressed(FOLDER / "settings" / f"{family}.npz", **score_settings(model, texts))
        print(family, {unit: len(arrays[f"{unit} start"]) for unit in STRIDES})


def train_tokenizer(texts: list[str]) -> None:
    """Train a tokenizer of 256 tokens, as many as the checkpoints have."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=["?"], limit_alphabet=120, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(FOLDER / "tokenizer.json"))


def score_settings(model, texts: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the results at every temperature, without a token of the beginning and with one in the prefix."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / "lm_eval" / "llama" / "tokenizer.json"))
    begin = tokenizer.token_to_id("<s>")
    arrays = {}
    for temperature, has_bos in itertools.product(TEMPERATURES, (False, True)):
        rows = []
        for name, text in texts.items():
            for span, ids in by_tokens(tokenizer, text, BOS_STRIDE, PREFIX + SUFFIX - has_bos):
                rows.append((name, *span, *score(model, [begin] * has_bos + ids, temperature)))
        for i, column in enumerate(("text", "start", "end", "log_prob", "rank", "top_log_prob")):
            arrays[f"{temperature} {has_bos} {column}"] = np.array([row[i] for row in rows])
    return arrays


def by_tokens(tokenizer: Tokenizer, text: str, stride: int, length: int = PREFIX + SUFFIX):
    """Yield ((start, end), ids) of every window that starts at a multiple of `stride` tokens."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    for first in range(0, len(encoding.ids) - length + 1, stride):
        last = first + length
        yield (encoding.offsets[first][0], encoding.offsets[last - 1][1]), encoding.ids[first:last]


def by_characters(tokenizer: Tokenizer, text: str, stride: int):
    """Yield ((start, end), ids) of every window that starts at a multiple of `stride` characters."""
    length = PREFIX + SUFFIX
    for start in range(0, len(text), stride):
        ids = tokenizer.encode(text[start : start + 20 * length], add_special_tokens=False).ids[:length]
        if len(ids) == length:
            yield (start, start + len(tokenizer.decode(ids, skip_special_tokens=False))), ids


def score(model, ids: list[int], temperature: float = 1.0):
    """Log-probability and rank of each token of the suffix, and the log of the probability of the top k."""
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double() / temperature, -1).numpy()
    each, ranks, tops = [], [], []
    for position in range(PREFIX, PREFIX + SUFFIX):
        row, token = log_probs[position - 1], ids[position]
        each.append(row[token])
        ranks.append(sum(1 for other in row if other > row[token]))
        tops.append(np.log(sum(np.exp(value) for value in sorted(row)[-TOP_K:])))
    return each, ranks, tops


def covered(characters: int, windows) -> dict[str, float]:
    """Threshold -> part of the characters that a window of at least that probability covers."""
    largest = [0.0] * characters
    for start, end, log_probs, _, _ in windows:
        p = float(np.exp(sum(log_probs)))
        for i in range(start, min(end, characters)):
            largest[i] = max(largest[i], p)
    return {f"{t:g}": sum(p >= t for p in largest) / characters for t in THRESHOLDS}


if __name__ == "__main__":
    main()
