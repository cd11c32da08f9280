"""python scripts/make_loss_reference.py: losses by transformers in float64, for tests/golden/loss.json.

Needs torch, which shardplan does not. It shares nothing with shardplan but the checkpoints, texts and tokenizer.
Windows are those of https://huggingface.co/docs/transformers/perplexity: each predicts the tokens that the one before
has not.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FOLDER = GOLDEN / "extraction"
FAMILIES = ("llama", "gpt2", "gemma2")
FIRST_TOKEN = 0
"""The token that begins every text where `with_first` is set."""
CASES = ({"position": 24, "stride": 10, "with_first": False}, {"position": 40, "stride": 39, "with_first": True})


def main() -> None:
    """Write the losses of every text and of every line of the texts, for each family and case."""
    files = {path.name: path.read_bytes().decode() for path in sorted((FOLDER / "texts").iterdir())}
    lines = [line for text in files.values() for line in text.splitlines() if line.strip()]
    texts = {**files, **{f"line {i}": line for i, line in enumerate(lines)}}
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    results = {}
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(
            GOLDEN / "data" / family, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        results[family] = [
            {**case, "texts": {name: measure(model, tokenizer, text, **case) for name, text in texts.items()}}
            for case in CASES
        ]
        print(family, [sum(each["loss"] for each in case["texts"].values()) for case in results[family]])
    (GOLDEN / "loss.json").write_text(json.dumps({"lines": lines, "families": results}, indent=1) + "\n")


def measure(model, tokenizer: Tokenizer, text: str, position: int, stride: int, with_first: bool) -> dict[str, float]:
    """Return the number of predicted tokens, their bytes, and their loss in nats."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = ([FIRST_TOKEN] if with_first else []) + encoding.ids
    if len(ids) < 2:
        return {"tokens": 0, "bytes": 0, "loss": 0.0}
    begin = 0 if with_first else encoding.offsets[1][0]
    nats, tokens, previous_end = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        end = min(start + position, len(ids))
        row = torch.tensor([ids[start:end]])
        labels = row.clone()
        labels[:, : previous_end - start] = -100
        with torch.no_grad():
            mean = model(row, labels=labels).loss.item()
        count = int((labels[:, 1:] != -100).sum())
        nats, tokens, previous_end = nats + mean * count, tokens + count, end
        if end == len(ids):
            break
    return {"tokens": tokens, "bytes": len(text[begin:].encode()), "loss": nats}


if __name__ == "__main__":
    main()
