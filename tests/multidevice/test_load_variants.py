"""Checkpoints as other tools save them load with the right values, or are refused: heads, names, further files."""

import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_load import assert_equal, mesh_of, reference, word_tokenizer

from shardplan import HFCheckpointConverter, load_pretrained
from shardplan.checkpoint.session import prepare
from shardplan.config import parse_config
from shardplan.config.command_flags import ConvertCommand
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.search.make_plan import make_plan

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensors_of(folder):
    """Return the tensors of a checkpoint, as the official library reads them."""
    return {name: value for shard in sorted(folder.glob("*.safetensors")) for name, value in load_file(shard).items()}


def write(folder, source, tensors, index=None, **config):
    """Write a checkpoint: config.json of `source` with other values, and tensors by name, or by file and name."""
    values = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    files = tensors if index is not None else {"model.safetensors": tensors}
    for name, content in files.items():
        save_file(content, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def load(folder, **arguments):
    with jax.set_mesh(mesh_of(1, 4, 2)):
        return load_pretrained(str(folder), axis_mapping={"embed": "data", "vocab": "model"}, **arguments)


def warnings_of(caplog):
    """Return shardplan's warnings; transformers warns of small vocabularies."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name.startswith("shardplan")
    ]


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("llama", lambda name: f"_orig_mod.{name}"),
        ("llama", lambda name: name.removeprefix("model.")),
        ("mixtral", lambda name: name.replace("model.", "model.language_model.", 1)),
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        ("gpt2", lambda name: f"module.{name}"),
    ],
)
def test_other_names(golden, tmp_path, caplog, name, rename):
    tensors = {rename(each): value for each, value in tensors_of(golden / name).items()}
    write(tmp_path, golden / name, tensors)
    assert_equal(load(tmp_path), reference(golden / name))
    assert not warnings_of(caplog)


@pytest.mark.parametrize("kind", ["own", "last number", "copy", "copy of another type", "only the head"])
def test_the_output_head_of_a_tied_model(golden, tmp_path, caplog, kind):
    """A copy of the embedding is accepted, by its values; another head is used, as transformers 5 does."""
    tensors = tensors_of(golden / "llama")
    head = tensors[HEAD] if kind == "own" else tensors[EMBEDDING].copy()
    if kind == "last number":
        head[-1, -1] += 1
    if kind == "copy of another type":
        tensors[EMBEDDING] = tensors[EMBEDDING].astype(ml_dtypes.bfloat16)
        head = tensors[EMBEDDING].astype(np.float32)
    tensors[HEAD] = head
    if kind == "only the head":
        del tensors[EMBEDDING]
    write(tmp_path, golden / "llama", tensors, tie_word_embeddings=True)
    module = load(tmp_path, dtype="float32")
    if kind in ("own", "last number"):
        np.testing.assert_array_equal(module.lm_head.weight.array, head)
        (warning,) = warnings_of(caplog)
        assert "ties the output head to the embedding, and lm_head.weight differs from it; it is the head" in warning
    else:
        assert module.lm_head is None and not warnings_of(caplog)
        np.testing.assert_array_equal(module.embeddings.token_embeddings.weight.array, head)


def test_a_plan_without_the_output_head_is_refused(golden, tmp_path, raises_message):
    """Also the other way round; a run without a given plan makes one with the head."""
    tensors = tensors_of(golden / "llama")
    write(tmp_path, golden / "llama", tensors, tie_word_embeddings=True)
    config = parse_config([f"--model.ref={tmp_path}", "--workload.position=64"], ConvertCommand)
    tied = make_plan(config)
    with raises_message(ConfigError):
        load_pretrained(str(tmp_path), plan=tied)
    with raises_message(ConfigError):
        prepare(config, tied)
    session = prepare(config, None)
    assert "lm_head.weight" in {parameter.path for parameter in session.plan.parameters}
    module, _ = session.load(session.model.template)
    np.testing.assert_array_equal(module.lm_head.weight.array, tensors[HEAD].astype(ml_dtypes.bfloat16))
    again = prepare(config, session.plan)  # a Plan file with the head
    assert again.model.template.lm_head is not None
    write(tmp_path, golden / "llama", {**tensors, HEAD: tensors[EMBEDDING]}, tie_word_embeddings=True)
    with raises_message(ConfigError):
        prepare(config, session.plan)


def test_an_output_head_that_the_model_has_no_place_for(golden, tmp_path, raises_message):
    """GPT-2 of Levanter has none, nor has a model that the caller's configuration ties."""
    tensors = tensors_of(golden / "gpt2")
    embedding = tensors["transformer.wte.weight"]
    write(tmp_path, golden / "gpt2", {**tensors, HEAD: embedding.copy()}, tie_word_embeddings=False)
    assert_equal(load(tmp_path), reference(golden / "gpt2"))
    write(tmp_path, golden / "gpt2", {**tensors, HEAD: embedding + 1}, tie_word_embeddings=False)
    with raises_message(CheckpointError):
        load(tmp_path)
    tensors = tensors_of(golden / "llama")
    write(tmp_path, golden / "llama", tensors, tie_word_embeddings=True)
    config = build_model(read_config(str(tmp_path / "config.json"), None, LEVANTER), 64).config
    with raises_message(CheckpointError):
        load(tmp_path, config=config)
    write(tmp_path, golden / "llama", {**tensors, "lm_head.bias": np.zeros(256, np.float32)})
    with raises_message(CheckpointError):
        load(tmp_path)


def test_the_converter_uses_the_head_too(golden, tmp_path):
    from levanter.models.llama import LlamaConfig
    from transformers import LlamaConfig as HfLlamaConfig

    tensors = tensors_of(golden / "llama")
    write(tmp_path, golden / "llama", tensors, tie_word_embeddings=True)
    converter = HFCheckpointConverter(
        LlamaConfig, str(tmp_path), HfConfigClass=HfLlamaConfig, tokenizer=word_tokenizer(256)
    )
    with jax.set_mesh(mesh_of(1, 4, 2)):
        module = converter.load_pretrained(None)
    np.testing.assert_array_equal(module.lm_head.weight.array, tensors[HEAD])


def test_two_sets_of_weights(golden, tmp_path, caplog, raises_message):
    """A single file beside an index: the same values are accepted, others are refused, a part is not asked."""
    tensors = tensors_of(golden / "llama")
    index = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    files = {"model-00001-of-00001.safetensors": tensors}
    said = "model.safetensors and the files of model.safetensors.index.json hold the same weights; the latter are read"
    for single, expected in (
        ({NORM: tensors[NORM] + 1}, []),
        (tensors, [f"{tmp_path}: {said}"]),
        ({f"_orig_mod.{name}": value for name, value in tensors.items()}, [f"{tmp_path}: {said}"]),
    ):
        write(tmp_path, golden / "llama", {**files, "model.safetensors": single}, index)
        assert_equal(load(tmp_path), reference(golden / "llama"))
        assert warnings_of(caplog) == expected
        caplog.clear()
    write(tmp_path, golden / "llama", {**files, "model.safetensors": {**tensors, NORM: tensors[NORM] + 1}}, index)
    with raises_message(CheckpointError):
        load(tmp_path)


def test_what_the_index_gets_wrong_is_said_if_it_is_needed(golden, tmp_path, caplog, raises_message):
    tensors = tensors_of(golden / "llama")
    shards = {"a.safetensors": {**tensors, NORM: tensors[NORM] + 1}, "b.safetensors": {NORM: tensors[NORM]}}
    index = {**dict.fromkeys(tensors, "a.safetensors"), NORM: "b.safetensors", "mtp.fc.weight": "c.safetensors"}
    write(tmp_path, golden / "llama", shards, index)
    assert_equal(load(tmp_path), reference(golden / "llama"))  # the index decides
    (warning,) = warnings_of(caplog)
    assert warning.endswith("names files that do not exist (c.safetensors); the model needs none of them")
    caplog.clear()
    del shards["a.safetensors"][NORM], index[NORM], index["mtp.fc.weight"]
    index["other.weight"] = "b.safetensors"
    write(tmp_path, golden / "llama", shards, index)
    assert_equal(load(tmp_path), reference(golden / "llama"))
    unlisted, absent = warnings_of(caplog)
    assert unlisted.endswith("does not say where model.norm.weight is; read from b.safetensors")
    assert absent.endswith("lists tensors that no file holds (other.weight); the model needs none of them")
    shards["a.safetensors"][NORM] = tensors[NORM]  # an equal copy in a file that the index does not name for it
    write(tmp_path, golden / "llama", shards, index)
    assert_equal(load(tmp_path), reference(golden / "llama"))
    shards["a.safetensors"][NORM] = tensors[NORM] + 1
    write(tmp_path, golden / "llama", shards, index)
    with raises_message(CheckpointError):
        load(tmp_path)
    index[NORM] = "c.safetensors"
    del shards["a.safetensors"][NORM], shards["b.safetensors"]
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors.incomplete")
    write(tmp_path, golden / "llama", shards, index)
    with raises_message(CheckpointError):
        load(tmp_path)


def test_tensors_without_use_are_named_in_one_warning(golden, tmp_path, caplog):
    """With `strict` they are refused."""
    tensors = tensors_of(golden / "llama")
    further = {f"model.layers.{i}.self_attn.k_scale": np.ones(1, np.float32) for i in range(2)}
    further["mtp.fc.weight"] = np.ones((2, 2), np.float32)
    write(tmp_path, golden / "llama", {**tensors, **further})
    (tmp_path / "adapter_config.json").write_text("{}")
    assert_equal(load(tmp_path), reference(golden / "llama"))
    kinds = "2 x model.layers.N.self_attn.k_scale, mtp.fc.weight"
    text = f"{tmp_path} holds 3 tensors that the model has no use for ({kinds})"
    unneeded, adapter = warnings_of(caplog)
    assert unneeded == f"{text}; ignored (load.strict refuses such a checkpoint)"
    assert adapter.startswith(
        f"{tmp_path} holds an adapter beside the model (adapter_config.json), which is not applied"
    )
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, strict=True)
    assert str(error.value) == f"{text}; leave out load.strict to load it nevertheless"


@pytest.mark.parametrize("dtype", ["bf16", "BFLOAT16", ml_dtypes.bfloat16])
def test_names_of_types(golden, dtype):
    """As in configurations, a type has short names too."""
    expected = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors_of(golden / "llama").items()}
    embedding = load(golden / "llama", dtype=dtype).embeddings.token_embeddings.weight.array
    np.testing.assert_array_equal(np.asarray(embedding), expected[EMBEDDING])
