"""The drop-in for Levanter's converter saves the checkpoint that it loaded, sharded in any way."""

import dataclasses
import inspect
import json
import math
from pathlib import Path

import haliax as hax
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODEL_TYPES, word_tokenizer
from jax.sharding import Mesh
from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from levanter.compat.hf_checkpoints import save_hf_checkpoint_callback
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import Llama3RotaryEmbeddingsConfig
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from shardplan import HFCheckpointConverter, load_pretrained
from shardplan.checkpoint.levanter_converter import upload
from shardplan.checkpoint.saving import target
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER, LEVANTER_CLASSES
from shardplan.model.registry import build_model, config_class

MESHES = [
    Mesh(np.array(jax.devices()), ("data",)),
    Mesh(np.array(jax.devices()[:4]), ("model",)),
    Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("replica", "data", "model")),
    Mesh(np.array(jax.devices()[:3]), ("data",)),
]
CASES = [(name, MESHES[i % len(MESHES)]) for i, name in enumerate(MODEL_TYPES)]


def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(0))


def make_converter(folder, kind=HFCheckpointConverter, **settings):
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return kind(config_class(LEVANTER_CLASSES[model_type]), str(folder), tokenizer=tokenizer(), **settings)


def tensors(folder) -> dict[str, np.ndarray]:
    """Read all tensors of a folder with the official library."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        assert actual[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*case, marks=[pytest.mark.whole] if i % 3 else []) for i, case in enumerate(CASES)],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value.shape.values())),
)
def test_what_was_loaded_is_saved(golden, tmp_path, name, mesh):
    """Every tensor has the bytes of the source, and config.json makes the same model, with what Levanter leaves out."""
    converter = make_converter(golden / name)
    with jax.set_mesh(mesh):
        model = converter.load_pretrained(None)
        assert any(not leaf.array.sharding.is_fully_replicated for _, leaf in named_leaves(model))
        converter.save_pretrained(model, str(tmp_path))
    assert_same(tensors(tmp_path), tensors(golden / name))
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {path.name for path in tmp_path.iterdir()}
    before, after = (
        build_model(read_config(str(folder / "config.json"), None, LEVANTER), 8) for folder in (golden / name, tmp_path)
    )
    assert fields(before.config) == fields(after.config)
    assert (before.mask.sliding_window, before.logit_soft_cap) == (after.mask.sliding_window, after.logit_soft_cap)
    if hasattr(before.config, "attention_config"):
        assert before.config.attention_config() == after.config.attention_config()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == json.loads((golden / name / "config.json").read_text())["architectures"]


def fields(config):
    return type(config).__name__, vars(config)


def test_with_levanters_arguments(golden, tmp_path, monkeypatch, raises_message):
    """A cast, files of some size, no tokenizer, a changed config; a second save replaces all weights of the first."""
    converter = make_converter(golden / "llama").with_config_overrides({"custom": [1, 2]})
    expected = {name: value.astype(jnp.bfloat16) for name, value in tensors(golden / "llama").items()}
    with jax.set_mesh(MESHES[2]):
        model = converter.load_pretrained(None)
        converter.save_pretrained(
            model, str(tmp_path), save_tokenizer=False, max_shard_size=100_000, dtype=jnp.bfloat16
        )
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) > 4 and not any("tokenizer" in name for name in names)
        assert all(
            sum(v.nbytes for v in load_file(file).values()) <= 100_000 for file in tmp_path.glob("*.safetensors")
        )
        assert_same(tensors(tmp_path), expected)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["custom"] == [1, 2]
        assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {"bfloat16"}
        (tmp_path / "notes.txt").write_text("mine")
        generation = {"eos_token_id": [1, 2]}
        converter.save_pretrained(model, str(tmp_path), generation_config=generation, chat_template="{{ messages }}")
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}
    assert_same(tensors(tmp_path), tensors(golden / "llama"))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == generation
    assert (tmp_path / "notes.txt").exists()
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == "{{ messages }}"
    with (
        jax.set_mesh(MESHES[2]),
        raises_message(ConfigError),
    ):
        large = jax.tree.map(lambda array: array * 0 + 1e5, model)
        converter.save_pretrained(large, str(tmp_path / "large"), dtype=jnp.float16)
    assert (tmp_path / "large" / target.INCOMPLETE).exists()


@pytest.mark.quick
def test_a_replacement_that_is_interrupted_leaves_no_checkpoint(golden, tmp_path, monkeypatch):
    converter = make_converter(golden / "llama")

    def interrupt(*_):
        assert not list(tmp_path.glob("*.safetensors"))
        raise KeyboardInterrupt

    with jax.set_mesh(MESHES[3]):
        model = converter.load_pretrained(None)
        converter.save_pretrained(model, str(tmp_path), max_shard_size=100_000)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("shardplan.checkpoint.saving.save._assemble_bytes", interrupt)
            converter.save_pretrained(model, str(tmp_path))
        assert (tmp_path / target.INCOMPLETE).exists() and not (tmp_path / "config.json").exists()
        converter.save_pretrained(model, str(tmp_path))
    assert_same(tensors(tmp_path), tensors(golden / "llama"))


def test_a_changed_configuration_is_saved(golden, tmp_path):
    """What a training changed, beside what the reference has and Levanter has no place for."""
    folder = golden / "gemma2"
    converter = make_converter(folder)
    config = build_model(read_config(str(folder / "config.json"), None, LEVANTER), 8).config
    longer = type(config)(**{**vars(config), "max_seq_len": 512})
    with jax.set_mesh(MESHES[0]):
        model = converter.load_pretrained(None, config=longer)
        converter.save_pretrained(model.resize_vocab(264), str(tmp_path))
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    assert (after["max_position_embeddings"], after["vocab_size"]) == (512, 264)
    for key in ("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        assert after[key] == before[key], key


def test_frequencies_that_were_scaled_since_are_saved(golden, tmp_path):
    """Of a type whose configuration Levanter writes without them."""
    folder = golden / "mistral"
    config = build_model(read_config(str(folder / "config.json"), None, LEVANTER), 8).config
    scaled = dataclasses.replace(config, rope=Llama3RotaryEmbeddingsConfig(theta=20_000))
    converter = make_converter(folder)
    with jax.set_mesh(MESHES[3]):
        converter.save_pretrained(converter.load_pretrained(None, config=scaled), str(tmp_path))
    assert build_model(read_config(str(tmp_path / "config.json"), None, LEVANTER), 8).config.rope == scaled.rope
    assert_same(tensors(tmp_path), tensors(folder))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_model_of_other_sizes_than_the_reference(golden, tmp_path, name):
    """The reference gives the tokenizer alone; heads of another size, and scaled frequencies, are not lost."""
    kind = config_class(LEVANTER_CLASSES[name])
    values = {"head_dim": 16} if name == "llama" else {"rope": Llama3RotaryEmbeddingsConfig()}
    sizes = {"hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    config = kind(max_seq_len=32, **sizes, **values)
    converter = make_converter(golden / name)
    with jax.set_mesh(MESHES[1]):
        model = config.model_type.init(hax.Axis("vocab", 256), config, key=jax.random.PRNGKey(0))
        converter.save_pretrained(model, str(tmp_path))
        loaded = load_pretrained(str(tmp_path))
    for (path, actual), (_, expected) in zip(named_leaves(loaded), named_leaves(model), strict=True):
        np.testing.assert_array_equal(np.asarray(actual.array), np.asarray(expected.array), err_msg=path)
    assert loaded.config.attention_config().head_size == values.get("head_dim", 8)
    assert loaded.config.rope == config.rope


@pytest.mark.parametrize("with_reference", [True, False])
def test_a_tied_mistral(golden, tmp_path, with_reference):
    """Levanter's configuration of a Mistral has no place for a tied head, nor for heads of another size."""
    folder, out = tmp_path / "mistral", tmp_path / "out"
    source, config = tensors(golden / "llama31"), json.loads((golden / "llama31" / "config.json").read_text())
    head_dim = config["head_dim"] // 2
    for name in source:
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            source[name] = source[name][::2]
        elif name.endswith("o_proj.weight"):
            source[name] = np.ascontiguousarray(source[name][:, ::2])
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": head_dim}))
    save_file(source, folder / "model.safetensors")
    converter = make_converter(folder)
    with jax.set_mesh(MESHES[2]):
        model = converter.load_pretrained(None)
        if not with_reference:
            kind = type(model.config.to_hf_config(256))
            converter = HFCheckpointConverter(
                config_class(LEVANTER_CLASSES["mistral"]), None, HfConfigClass=kind, tokenizer=tokenizer()
            )
        converter.save_pretrained(model, str(out))
    assert_same(tensors(out), source)
    saved = json.loads((out / "config.json").read_text())
    assert saved["tie_word_embeddings"] and saved["head_dim"] == head_dim


@pytest.mark.usefixtures("patched_levanter")
@pytest.mark.parametrize("name", ["gemma", "gemma2", "mistral"])
def test_a_converter_that_was_made_of_a_configuration(golden, tmp_path, name):
    """As `hf_checkpoint_converter` of these types makes it, with no class for its class."""
    kind = config_class(LEVANTER_CLASSES[name])
    hf_class = type(kind().to_hf_config(256))
    converter = LevanterConverter(kind(), str(golden / name), HfConfigClass=hf_class, tokenizer=tokenizer())
    with jax.set_mesh(MESHES[1]):
        converter.save_pretrained(converter.load_pretrained(None), str(tmp_path))
    assert_same(tensors(tmp_path), tensors(golden / name))


@pytest.mark.usefixtures("patched_levanter")
def test_levanters_callback_and_converter(golden, tmp_path):
    """Patched, Levanter's own converter saves alike, also through the callback of its trainers."""
    converter = make_converter(golden / "qwen3", LevanterConverter)

    class Step:
        step = 7

    with jax.set_mesh(MESHES[2]):
        Step.eval_model = converter.load_pretrained(None)
        callback = save_hf_checkpoint_callback(str(tmp_path), converter)
        callback(Step)
        callback(Step)  # a training that was resumed saves a step once more
    assert_same(tensors(tmp_path / "step-7"), tensors(golden / "qwen3"))


def test_arguments_are_those_of_levanter():
    ours, theirs = (inspect.signature(kind.save_pretrained) for kind in (HFCheckpointConverter, LevanterConverter))
    assert theirs.parameters.keys() <= ours.parameters.keys()
    for name, parameter in theirs.parameters.items():
        if name not in ("export_host_budget_bytes", "max_concurrent_shards"):
            assert ours.parameters[name].default == parameter.default, name


def test_upload(golden, tmp_path, monkeypatch, raises_message):
    """Exactly the files of the checkpoint, into a private repository that is made if there is none."""
    calls = []
    monkeypatch.setattr(huggingface_hub, "repo_exists", lambda *a, **k: False)
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda *a, **k: calls.append(("create", a, k)))
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **k: calls.append(("upload", k)))
    (tmp_path / "notes.txt").write_text("mine")
    converter = make_converter(golden / "gpt2")
    with jax.set_mesh(MESHES[1]):
        model = converter.load_pretrained(None)
        converter.save_pretrained(model, str(tmp_path), upload_to_hf="me/model@draft", commit_message="Step 7")
    (_, names, created), (_, uploaded) = calls
    assert names == ("me/model",) and created["private"]
    assert (uploaded["repo_id"], uploaded["revision"], uploaded["commit_message"]) == ("me/model", "draft", "Step 7")
    assert uploaded["folder_path"] == str(tmp_path)
    assert set(uploaded["allow_patterns"]) == {path.name for path in tmp_path.iterdir()} - {"notes.txt"}

    def refuse(**_):
        raise OSError("401: who are you?")

    monkeypatch.setattr(huggingface_hub, "upload_folder", refuse)
    with (
        jax.set_mesh(MESHES[1]),
        raises_message(ConfigError),
    ):
        converter.save_pretrained(model, str(tmp_path), upload_to_hf="me/model")
    no_reference = HFCheckpointConverter(
        config_class(LEVANTER_CLASSES["gpt2"]), None, HfConfigClass=converter.HfConfigClass, tokenizer=tokenizer()
    )
    with raises_message(ConfigError):
        no_reference.save_pretrained(model, str(tmp_path), upload_to_hf=True)


def test_upload_from_an_object_store(tmp_path, monkeypatch, store):
    """One file at a time, because the folder is on no disk."""
    client, _, _ = store
    content = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"tokens", "notes.txt": b"mine"}
    for name, data in content.items():
        client.put_object(Bucket="models", Key=f"out/{name}", Body=data)
    uploaded = {}

    def upload_file(path_or_fileobj, path_in_repo, **_):
        uploaded[path_in_repo] = Path(path_or_fileobj).read_bytes()

    monkeypatch.setattr(huggingface_hub, "upload_file", upload_file)
    repository = upload.find_repository(None, "me/model")
    upload.upload_checkpoint("s3://models/out", ["tokenizer.json"], repository, 7, {})
    assert uploaded == {name: data for name, data in content.items() if name != "notes.txt"}


def test_weights_of_the_reference_are_not_copied(golden, tmp_path):
    """The code that lies beside them is."""
    reference = tmp_path / "reference"
    (reference / "sub").mkdir(parents=True)
    for file in (golden / "llama").iterdir():
        (reference / file.name).write_bytes(file.read_bytes())
    (reference / "modeling.py").write_text("code")
    (reference / "sub" / "more.py").write_text("more")
    converter = make_converter(reference)
    with jax.set_mesh(MESHES[0]):
        model = converter.load_pretrained(None)
        converter.save_pretrained(model, str(tmp_path / "out"), save_reference_code=True, save_tokenizer=False)
    assert (tmp_path / "out" / "sub" / "more.py").read_text() == "more"
    assert {path.name for path in (tmp_path / "out").glob("*.s*")} == {"model.safetensors"}
    assert_same(tensors(tmp_path / "out"), tensors(golden / "llama"))


def test_a_gemma2_has_its_soft_cap(golden):
    """Logits are those of transformers, and Levanter's loss is that of these logits."""
    reference = np.load(golden / "gemma2" / "golden.npz")
    logits, tokens = reference["logits"].astype(np.float64), reference["tokens"]
    with jax.set_mesh(MESHES[3]):
        model = make_converter(golden / "gemma2").load_pretrained(None, axis_mapping={})
        named = hax.named(jnp.asarray(tokens), ("batch", "position"))
        actual = model(named, AttentionMask.causal())
        assert np.abs(np.asarray(actual.rearrange(("batch", "position", "vocab")).array) - logits).max() < 2e-5
        from levanter.models.lm_model import LmExample

        example = LmExample(tokens=named, loss_weight=hax.ones(named.axes), attn_mask=AttentionMask.causal())
        losses = model.compute_next_token_loss(example, reduction=None).rearrange(("batch", "position")).array
    normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(normalised[:, :-1], tokens[:, 1:, None].astype(int), -1)[..., 0]
    np.testing.assert_allclose(np.asarray(losses)[:, :-1], expected, atol=2e-5)
    assert math.isclose(model.config.final_logit_softcapping, 30.0)
