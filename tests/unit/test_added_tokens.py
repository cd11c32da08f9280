"""Tokens that only the files beside a tokenizer.json add: encoded as by transformers' AutoTokenizer."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shardplan.errors import CheckpointError
from shardplan.eval.texts.tokenizer import read_tokenizer
from shardplan.storage import open_folder

TOKENIZER = Path(__file__).parents[1] / "golden" / "extraction" / "tokenizer.json"
SIZE = 256
"""Tokens of this tokenizer.json."""
TEXT = "a <|im_start|>user<|im_end|> word words <pad><eos> <a><b> <x><y>zed  <mask> the end"


def entry(content, **flags):
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


DECODER = {
    str(SIZE): entry("<|im_start|>"),
    str(SIZE + 1): entry("<|im_end|>"),
    str(SIZE + 2): entry("word", special=False, normalized=True),
}
FILES = {
    "decoder": {"tokenizer_config": {"added_tokens_decoder": DECODER}},
    "decoder and names": {
        "tokenizer_config": {"added_tokens_decoder": DECODER, "pad_token": "<pad>", "eos_token": "<|im_end|>"},
        "special_tokens_map": {"bos_token": "<x>"},
    },
    "names": {"tokenizer_config": {"pad_token": "<pad>", "eos_token": {**entry("<eos>"), "__type": "AddedToken"}}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<a>", "<b>"]}},
    "map": {"tokenizer_config": {}, "special_tokens_map": {"pad_token": "<pad>", "additional_special_tokens": ["<x>"]}},
    "added": {
        "tokenizer_config": {}, "added_tokens": {"<y>": SIZE, "zed": SIZE + 1},
        "special_tokens_map": {"pad_token": "<y>"},
    },
    "space before": {"tokenizer_config": {"added_tokens_decoder": {str(SIZE): entry("<mask>", lstrip=True)}}},
}  # fmt: skip


def make_folder(tmp_path, files):
    shutil.copy(TOKENIZER, tmp_path)
    for name, values in files.items():
        if name == "tokenizer_config":
            values = {"tokenizer_class": "PreTrainedTokenizerFast", **values}
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return open_folder(str(tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_tokens_equal_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_buffer(read_tokenizer(make_folder(tmp_path, FILES[name])))
    expected = AutoTokenizer.from_pretrained(tmp_path)(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == expected
    assert len(expected) < len(Tokenizer.from_file(str(TOKENIZER)).encode(TEXT, add_special_tokens=False).ids)


def test_a_tokenizer_that_is_complete_is_not_changed(tmp_path):
    folder = make_folder(tmp_path, {"tokenizer_config": {"bos_token": "?"}})
    assert read_tokenizer(folder) == TOKENIZER.read_bytes()


def test_damaged_files_are_rejected(tmp_path):
    cases = (
        ({"tokenizer_config": {"added_tokens_decoder": {"300": entry("<x>")}}}, "'<x>' the id 300, and .* it is 256"),
        ({"tokenizer_config": {"added_tokens_decoder": {"256": 3}}}, "adds to tokenizer.json are damaged"),
        ({"tokenizer_config": {}, "added_tokens": [1]}, "added_tokens.json holds no keys"),
    )
    for files, message in cases:
        with pytest.raises(CheckpointError, match=message):
            read_tokenizer(make_folder(tmp_path, files))
