"""python scripts/make_lm_eval_reference.py: results of lm_eval's own `hf` model, for tests/golden/lm_eval.

Needs torch and accelerate, which shardplan does not. Trains the tokenizers and writes the data of the two tasks where
they are missing, and stores for every family the metrics and the result of every request (hf.json); and the results of
requests whose context and continuation meet within a word, and the prompts of chats (hf_requests.json).
"""

import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from compare_lm_eval import FAMILIES, FOLDER, MAX_LENGTH, ROOT, evaluate, make_checkpoint
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

JOINS = (
    ("Permis", "sion is granted"), ("The licence is fre", "e"), ("o", "f"), ("all of th", "e"), ("t", "he"),
    ("a", "nd"), ("The licence is ", "free"), ("copy", "right"), ("the so", "ftware"), ("Größe und Stra", "ße:"),
    ("i", "n"), ("to th", "e best of my knowledge"), (" ".join(["permission"] * 40) + " o", "f"), ("  ", "free"),
    ("мир", " мир"),
)  # fmt: skip
"""Contexts and continuations, most of which meet within a word."""
REFUSES_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[model] {% endif %}"
)
HAS_SYSTEM = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)
TEMPLATES = (REFUSES_SYSTEM, HAS_SYSTEM)
USER = {"role": "user", "content": "Is it free?"}
CHATS = (
    [{"role": "system", "content": "Be brief."}, USER],
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Yes."}, USER],
)
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
        requests = score_requests(checkpoint)
        (FOLDER / name / "hf_requests.json").write_text(json.dumps(requests, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(checkpoint.parent)
        print(name, result["metrics"])


def score_requests(checkpoint: Path) -> dict[str, list[dict[str, Any]]]:
    """Score every request of `JOINS`, and write every chat of `CHATS`, with the `hf` model.

    A request that ends the `hf` model has its result for the tokens of the continuation by itself, and `is_alone`.
    """
    model = HFLM(pretrained=str(checkpoint), max_length=MAX_LENGTH, dtype="float32", device="cpu")
    joins = []
    for context, continuation in JOINS:
        request = Instance("loglikelihood", {}, (context, continuation), 0)
        try:
            (result,), is_alone = model.loglikelihood([request], disable_tqdm=True), False
        except AssertionError:
            kept = context.rstrip()  # spaces at the end count with the continuation
            before = model.tok_encode(kept) or [model.prefix_token_id]
            after = model.tok_encode(context[len(kept) :] + continuation, add_special_tokens=False)
            (result,), is_alone = model._loglikelihood_tokens([(("", ""), before, after)], disable_tqdm=True), True
        joins.append({"context": context, "continuation": continuation, "result": result, "is_alone": is_alone})
    chats = []
    for template, messages in itertools.product(TEMPLATES, CHATS):
        model.tokenizer.chat_template = template
        chats.append({"template": template, "messages": messages, "prompt": model.apply_chat_template(messages)})
    return {"joins": joins, "chats": chats}


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
