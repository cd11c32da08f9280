"""Texts are read from every kind of file as they are, and encoded in pieces as at once."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardplan.errors import ConfigError
from shardplan.eval.texts import store as texts
from shardplan.eval.texts.encoding import PieceEncoder
from shardplan.eval.texts.store import open_texts, read_characters

LINES = '{"id": "x", "text": "one"}\n\n{"text": "zwö\u2028lf\\n"}\n'


def content(store, text):
    return read_characters(store.path, text.pieces, 0, text.characters)


def contents(path, limit=None):
    """(id, text) of every text of a path."""
    store = open_texts(str(path), limit)
    return [(text.id, content(store, text)) for text in store.texts]


def compress(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def test_every_kind_of_file(tmp_path):
    expected = [("x", "one"), ("3", "zwö\u2028lf\n")]
    for name, data in (
        ("a.jsonl", LINES.encode()), ("b.jsonl", LINES.encode("utf-8-sig")), ("c.JSONL", LINES.encode()),
        ("d.jsonl.gz", gzip.compress(LINES.encode())), ("e.jsonl.zst", compress(LINES.encode())),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        assert contents(tmp_path / name) == expected, name
    assert contents(tmp_path / "a.jsonl", 1) == expected[:1]
    pq.write_table(pa.table({"id": ["x", None], "text": ["one", "zwei"], "n": [1, 2]}), tmp_path / "f.parquet")
    assert contents(tmp_path / "f.parquet") == [("x", "one"), ("2", "zwei")]
    pq.write_table(pa.table({"content": ["one"]}), tmp_path / "g.parquet")
    assert contents(tmp_path / "g.parquet") == [("1", "one")]
    (tmp_path / "h.txt").write_bytes("\ufeffeins\r\nzwei".encode())
    assert contents(tmp_path / "h.txt") == [("h.txt", "eins\r\nzwei")]


def test_a_folder_of_files(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "README.md").write_text("no text")
    assert contents(tmp_path) == [("a.jsonl:1", "one"), ("b.txt", "two")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.jsonl",
            b'{"id": 3, "content": "x"}\n',
            "line 1 has no key text; it has id, content; rename the one with the ",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"content": "x"}\n',
            "line 2 has no key text; it has content; rename the one with",
        ),
        ("a.jsonl", b"{}\n", "line 1 has no key text; it has none"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: text is a number, 3; it must be a string"),
        ("a.jsonl", b'{"text": null}\n', "line 1: text is null; it must be a string"),
        ("a.jsonl", b'{"text": ["a", "b"]}\n', r'line 1: text is a list, \["a", "b"\]; it must be a string'),
        ("a.jsonl", b'"text"\n', "line 1 is text; it must be an object with the key text, which is a string"),
        (
            "a.jsonl",
            b'[{"text": "x"}]\n',
            "line 1 is a list; it must be an object with the key text, which is a string",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: text is no Unicode: 'utf-8' codec can't encode"),
        ("a.jsonl", b"[" * 100000, "line 1 is not JSON: maximum recursion depth exceeded"),
        ("a.jsonl", b"\xff\xfe", "line 1 is not JSON: 'utf-8' codec can't decode"),
        ("a.jsonl", b"", "a.jsonl holds no text"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.jsonl", b'{"id": 2, "text": "a"}\n{"text": "b"}\n', "line 2: id '2' is that of .*line 1 already"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz is damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "a.jsonl.gz is damaged"),
        ("a.jsonl.zst", b"no zstd", "a.jsonl.zst is damaged"),
        ("a.parquet", b"no parquet", "a.parquet is damaged"),
        ("a.txt", b"\xff", "a.txt is not UTF-8"),
        ("a.txt", b'{"text": "one"}\n', "a.txt holds JSON lines; rename it to .jsonl"),
        ("a.csv", b"", "ends in none of .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet"),
    ],
)
def test_files_that_are_not_what_they_are_called(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        open_texts(str(tmp_path / name))


def test_missing_files_and_columns(tmp_path, raises_message):
    for name in ("none.jsonl", "none"):
        with raises_message(ConfigError):
            open_texts(str(tmp_path / name))
    with raises_message(ConfigError):
        open_texts(str(tmp_path))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "elsewhere.txt")
    with raises_message(ConfigError):
        open_texts(str(tmp_path))
    (tmp_path / "texts.jsonl").touch()
    with raises_message(ConfigError):
        open_texts(str(tmp_path))  # what is left would be evaluated in its place
    (tmp_path / "gone.txt").unlink()
    with raises_message(ConfigError):
        open_texts(str(tmp_path / "text.jsonl"))
    pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "a.parquet")
    with raises_message(ConfigError):
        open_texts(str(tmp_path / "a.parquet"))


@pytest.mark.slow
def test_from_an_object_store(store, tmp_path, raises_message):
    client, environment, _ = store
    client.put_object(Bucket="models", Key="books/a.txt", Body=b"one")
    client.put_object(Bucket="models", Key="books/b.jsonl", Body=b'{"text": "two"}\n')
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        assert contents("s3://models/books") == [("a.txt", "one"), ("b.jsonl:1", "two")]
        assert contents("s3://models/books/a.txt") == [("a.txt", "one")]
        with raises_message(ConfigError):
            open_texts("s3://models/books/c.txt")


def trained(kind):
    """A tokenizer of a kind, trained on a little text."""
    corpus = ["the quick brown fox jumps over the lazy dog, and the dogs jump; Größe über 東京 🙂 naïve"] * 3
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    elif kind == "whole text":  # as Llama 2: nothing divides the text before it is merged
        tokenizer = Tokenizer(models.BPE(unk_token="?", byte_fallback=False))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["?"], show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="?", special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["byte-level", "whole text", "unigram"])
def tokenizer(request):
    return trained(request.param)


WORDS = ["the ", "quick ", "fox", "jumps, ", "über", " Größe", "東京", "🙂", "\n\n", "  ", "dogs", "naïve ", "x"]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=900), st.integers(150, 400))
def test_pieces_are_encoded_as_the_text_at_once(tokenizer, tmp_path_factory, words, piece):
    text = "".join(words)
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", piece)
        patch.setattr("shardplan.eval.texts.encoding.PIECE", piece)
        patch.setattr("shardplan.eval.texts.encoding.CONTEXT", piece // 3)
        store = open_texts(str(folder))
        stored = store.texts[0]
        assert (stored.characters, content(store, stored)) == (len(text), text)
        encoder = PieceEncoder(tokenizer, store.path, stored.pieces, stored.characters)
        parts = [encoder.encode(i) for i in range(len(stored.pieces) - 1)]
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert [i for part in parts for i in part.ids] == whole.ids
    assert [(s, e) for part in parts for s, e in zip(part.starts, part.ends, strict=True)] == whole.offsets


def test_a_text_without_boundaries_is_split_at_its_pieces(tmp_path, monkeypatch):
    """Of equal characters the encodings of the two sides may agree nowhere: still every character is encoded once."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "aa": 1, "aaa": 2}, [("a", "a"), ("aa", "a")]))
    (tmp_path / "a.txt").write_text("a" * 1000)
    monkeypatch.setattr(texts, "PIECE", 100)
    monkeypatch.setattr("shardplan.eval.texts.encoding.PIECE", 100)
    monkeypatch.setattr("shardplan.eval.texts.encoding.CONTEXT", 25)
    store = open_texts(str(tmp_path))
    encoder = PieceEncoder(tokenizer, store.path, store.texts[0].pieces, 1000)
    parts = [encoder.encode(i) for i in range(10)]
    lengths = np.concatenate([part.ends - part.starts for part in parts])
    starts = np.concatenate([part.starts for part in parts])
    assert lengths.sum() == 1000 and (np.cumsum(lengths)[:-1] == starts[1:]).all()


def test_json_of_a_store_is_read_by_line(tmp_path):
    rows = [{"id": i, "text": "x" * i} for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert contents(tmp_path / "a.jsonl") == [(str(row["id"]), row["text"]) for row in rows]
