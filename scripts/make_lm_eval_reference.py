"""python scripts/make_lm_eval_reference.py: results of lm_eval's own `hf` model, for tests/golden/lm_eval.

Needs torch and accelerate, which shardplan does not. Trains the tokenizers and writes the data of the two tasks where
they are missing, and stores for every family the metrics and the result of every request.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from compare_lm_eval import FAMILIES, FOLDER, MAX_LENGTH, ROOT, evaluate, make_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = ROOT / "tests" / "golden" / "extraction" / "texts"


def main() -> None:
    """Make what is missing, and run the `hf` model on every family."""
    os.chdir(ROOT)
    texts = {path.name: path.read_bytes().decode() for path in sorted(TEXTS.iterdir())}
    if not (FOLDER / "choices.jsonl").exists():
        write_data(texts)
    for name, settings in FAMILIES.items():
        if not (FOLDER / name / "tokenizer.json").exists():
            train_tokenizer(list(texts.values()), FOLDER / name, settings.begin, settings.end, settings.adds_begin)
        checkpoint = make_checkpoint(name, Path(tempfile.mkdtemp()) / name)
        result = evaluate(
            "hf", {"pretrained": str(checkpoint), "max_length": MAX_LENGTH, "dtype": "float32", "device": "cpu"}
        )
        (FOLDER / name / "hf.json").write_text(json.dumps(result, indent=0) + "\n")
        shutil.rmtree(checkpoint.parent)
        print(name, result["metrics"])


def write_data(texts: dict[str, str]) -> None:
    """Write the documents of both tasks."""
    licence, unicode = texts["license.txt"], texts["unicode.txt"]
    words = 2 * licence.split()
    choices = [
        {"query": "", "choices": ["Permission is granted", "東京と京都", "мир"], "answer": 0},
        {"query": "The licence is ", "choices": ["free", "free of charge", "not free"], "answer": 1},
        {"query": "The licence is ", "choices": ["free", "free of charge", "not free"], "answer": 1},
        {"query": "Two spaces  ", "choices": ["a", "b", "a b"], "answer": 2},
        {"query": "A line\n", "choices": ["yes", "no", "?"], "answer": 1},
        {"query": "Größe und Straße:", "choices": ["東京 🙂", 'γειά σου — "quoted"', "мир!"], "answer": 2},  # noqa: RUF001
    ]
    for i in range(14):
        start, length = 17 * i, 3 + 9 * i  # the longest contexts exceed the length
        context, after = words[start : start + length], words[start + length : start + length + 4]
        wrong = [words[start * 3 // 2 + 5], " ".join(reversed(after))]
        choices.append({"query": " ".join(context), "choices": [" ".join(after), *wrong], "answer": i % 3})
    documents = [licence, unicode, texts["repeated.txt"][:700], "One short line.", "a", "🙂 мир", licence[200:420]]
    for name, rows in (("choices", choices), ("documents", [{"text": text} for text in documents])):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def train_tokenizer(texts: list[str], folder: Path, begin: str, end: str, adds_begin: bool) -> None:
    """Train a tokenizer of 256 tokens, as many as the checkpoints have, and write it as transformers reads it."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = list(dict.fromkeys(("?", begin, end)))
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=special, limit_alphabet=120, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "unk_token": "?"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
