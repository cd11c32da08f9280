"""Loaded models equal Levanter's conversion of what the official safetensors library reads, on any mesh and type."""

import hashlib
import math
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchange_schedules import make_exchange_schedule
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh, PartitionSpec
from levanter.compat.hf_checkpoints import RepoRef
from safetensors.numpy import load_file, save_file

from shardplan import HFCheckpointConverter, best_effort_sharding, load_pretrained
from shardplan.checkpoint import load
from shardplan.checkpoint.format.index import read_index
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.transfer import load_plan, stream
from shardplan.checkpoint.transfer.devices import destination
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.search.make_plan import make_plan
from shardplan.storage import open_folder
from shardplan.storage.folder import ReadTuning
from shardplan.storage.local import LocalFile


def template_of(folder: Path, model_class=LEVANTER):
    return build_model(read_config(str(folder / "config.json"), None, model_class), 64).template


def reference(folder: Path, dtype=None, model_class=LEVANTER) -> dict[str, np.ndarray]:
    """Return every array of the model, unsharded, as the official library and the model's own converter make it."""
    state = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state.update(load_file(shard))
    state = {name.removeprefix("transformer."): jnp.asarray(value) for name, value in state.items()}
    model = from_torch_compatible_state_dict(template_of(folder, model_class), state)
    arrays = {path: np.asarray(getattr(leaf, "array", leaf)) for path, leaf in named_leaves(model)}
    return {path: array if dtype is None else array.astype(dtype) for path, array in arrays.items()}


def assert_equal(module, expected: dict[str, np.ndarray]) -> None:
    leaves = dict(named_leaves(module))
    assert leaves.keys() == expected.keys()
    for path, leaf in leaves.items():
        array = leaf.array if isinstance(leaf, hax.NamedArray) else leaf
        assert array.dtype == expected[path].dtype, path
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[path][shard.index], err_msg=path)


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("replica", "data", "model"))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(sizes, name, marks=[pytest.mark.whole] if (i + j) % 2 else [])
        for i, sizes in enumerate([(1, 3, 1), (1, 1, 5), (1, 3, 2), (2, 2, 2), (1, 1, 1)])
        for j, name in enumerate(["llama", "mixtral", "gpt2", "qwen2"])
    ],
)
def test_best_effort_load(golden, name, sizes):
    mesh = mesh_of(*sizes)
    with jax.set_mesh(mesh):
        module = load_pretrained(str(golden / name))
    assert_equal(module, reference(golden / name))
    for _, leaf in named_leaves(module):
        assert leaf.array.sharding == best_effort_sharding(leaf.array.shape, mesh)


@pytest.mark.parametrize("chunk_bytes", [700, 4096])
@pytest.mark.parametrize(
    "mapping",
    [
        {"embed": "data", "mlp": "model"},  # shards inner dimensions, so that shards interleave on disk
        {"mlp": ("model", "data"), "experts": "replica"},
        {"embed": ("replica", "data", "model")},
        {},
    ],
)
def test_any_chunk_size_and_mapping(golden, monkeypatch, chunk_bytes, mapping):
    monkeypatch.setattr(LocalFile, "tuning", ReadTuning(chunk_bytes, 3))
    monkeypatch.setattr(load_plan, "MAX_READ_BYTES", 8 * chunk_bytes)
    folder = golden / "mixtral"
    with jax.set_mesh(mesh_of(2, 2, 2)):
        module = load_pretrained(str(folder), axis_mapping=mapping)
    assert_equal(module, reference(folder))
    gate = module.transformer.layers.stacked.block_sparse_moe.experts.w1.weight
    assert gate.array.sharding.spec == hax.partitioning.pspec_for_axis(gate.axes, mapping)


MAPPINGS = [
    {"embed": "data", "mlp": "model"},
    {"mlp": ("model", "data"), "experts": "replica", "vocab": "replica"},
    {"embed": ("replica", "data", "model")},
    {"vocab": "data", "head_size": "model"},
    {},
]


@pytest.mark.parametrize(
    ("sizes", "name", "mapping"),
    [
        (sizes, name, mapping)
        for i, sizes in enumerate([(1, 3, 1), (1, 1, 5), (1, 3, 2), (2, 2, 2)])
        for j, mapping in enumerate(MAPPINGS)
        for name in [("llama", "mixtral", "gpt2")[(i + j) % 3]]
        if (i + j) % 4 == 0
    ],
)
def test_devices_that_read_rows_and_exchange(golden, monkeypatch, name, sizes, mapping):
    """Devices read rows and exchange them, as those of several processes do.

    On any mesh, in any order of dimensions, also if the rows do not divide among the devices.
    """
    template, folder, mesh = template_of(golden / name), open_folder(str(golden / name)), mesh_of(*sizes)
    exchanged = []
    original = stream.exchange_rows

    monkeypatch.setattr(load_plan, "make_schedule", make_exchange_schedule)
    monkeypatch.setattr(stream, "exchange_rows", lambda *args: exchanged.append(args[1]) or original(*args))
    monkeypatch.setattr(load_plan, "MAX_READ_BYTES", 20_000)
    module, _ = stream_checkpoint(template, folder, mesh, keep_divisible(template, mapping, mesh), None)
    assert_equal(module, reference(golden / name))
    assert len({transfer.path for transfer in exchanged}) > 3


def keep_divisible(template, mapping, mesh):
    """Return `mapping` without the entries whose mesh axes do not divide an axis of the model."""
    axes = {axis for _, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray) for axis in leaf.axes}

    def count(mesh_axes):
        return math.prod(mesh.shape[axis] for axis in ((mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes))

    return {
        name: mesh_axes
        for name, mesh_axes in mapping.items()
        if all(axis.size % count(mesh_axes) == 0 for axis in axes if axis.name == name)
    }


@pytest.mark.parametrize(
    ("mapping", "dtype"),
    [*((mapping, None) for mapping in MAPPINGS), (MAPPINGS[0], "float32"), (MAPPINGS[1], "bfloat16")],
)
def test_devices_with_memory_of_their_own(golden, monkeypatch, mapping, dtype):
    """Parts are put on the device, cast if that is narrower, and written into the shard there, as on accelerators.

    Several parts are in transit at the same time.
    """
    template, folder, mesh = template_of(golden / "mixtral"), open_folder(str(golden / "mixtral")), mesh_of(1, 2, 2)
    original = stream.stream_arrays
    monkeypatch.setattr(load, "stream_arrays", lambda *args, **more: original(*args, **more, zero_copy=False))
    monkeypatch.setattr(load_plan, "MAX_READ_BYTES", 20_000)
    module, _ = stream_checkpoint(template, folder, mesh, keep_divisible(template, mapping, mesh), dtype)
    assert_equal(module, reference(golden / "mixtral", dtype and jnp.dtype(dtype)))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [None, "float32", "float16", "bfloat16"])
def test_casts(golden, tmp_path, stored, dtype):
    (tmp_path / "config.json").write_bytes((golden / "llama" / "config.json").read_bytes())
    state = {}
    for shard in sorted((golden / "llama").glob("*.safetensors")):
        state.update(load_file(shard))
    save_file({name: value.astype(stored) for name, value in state.items()}, tmp_path / "model.safetensors")
    with jax.set_mesh(mesh_of(1, 2, 4)):
        module = load_pretrained(str(tmp_path), axis_mapping={"embed": "data", "mlp": "model"}, dtype=dtype)
    assert_equal(module, reference(tmp_path, None if dtype is None else jnp.dtype(dtype)))


@pytest.mark.parametrize("model_class", [None, LEVANTER])
def test_plan_drives_the_load(golden, make_config, model_class):
    """Also the class of the model is the plan's."""
    sizes = {"workload_position": 64, "mesh_data": 2, "mesh_model": 4}
    plan = make_plan(make_config(model_ref=golden / "llama", model_levanter_class=model_class, **sizes))
    module = load_pretrained(str(golden / "llama"), plan=plan)
    assert_equal(module, reference(golden / "llama", jnp.bfloat16, model_class))
    leaves = dict(named_leaves(module))
    for parameter in plan.parameters:
        array = leaves[parameter.path].array
        spec = PartitionSpec(*(tuple(axes) if axes else None for axes in parameter.spec))
        assert array.sharding.is_equivalent_to(jax.NamedSharding(array.sharding.mesh, spec), array.ndim)
        assert array.addressable_shards[0].data.nbytes == parameter.bytes_per_device


def test_levanter_configuration_and_current_mapping(golden):
    config = build_model(read_config(str(golden / "llama" / "config.json"), None, LEVANTER), 64).config
    with jax.set_mesh(mesh_of(1, 4, 2)), hax.axis_mapping({"mlp": "model"}):
        module = load_pretrained(str(golden / "llama"), config=config)
    assert_equal(module, reference(golden / "llama"))
    assert module.transformer.layers.stacked.mlp.up_proj.weight.array.sharding.spec == PartitionSpec(
        None, "model", None
    )


def test_a_reference_as_levanter_makes_it(golden):
    """`ref` may be a Levanter `RepoRef`."""
    with jax.set_mesh(mesh_of(1, 2, 2)):
        module = load_pretrained(RepoRef.from_string(str(golden / "llama")))
    assert_equal(module, reference(golden / "llama"))


def word_tokenizer(vocab):
    """Make a tokenizer of `vocab` words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(vocab)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))


@pytest.mark.parametrize("name", ["CustomConfig", "LlamaConfig"])
def test_a_configuration_class_of_the_user(golden, name):
    """A converter with a class of its own builds the model from it, as does `load_pretrained(config=...)`.

    Its name may be that of Levanter's.
    """
    from levanter.models.llama import LlamaConfig
    from transformers import LlamaConfig as HfLlamaConfig

    class CustomConfig(LlamaConfig):
        @classmethod
        def from_hf_config(cls, hf_config):
            return cls(**vars(LlamaConfig.from_hf_config(hf_config)))

        @property
        def model_type(self):
            models.append(self)
            return super().model_type

    CustomConfig.__name__ = name
    models, path, tokenizer = [], str(golden / "llama"), word_tokenizer(256)
    converter = HFCheckpointConverter(CustomConfig, path, HfConfigClass=HfLlamaConfig, tokenizer=tokenizer)
    with jax.set_mesh(mesh_of(1, 4, 2)):
        module = converter.load_pretrained(None, resize_vocab_to_match_tokenizer=False)
        assert_equal(module, reference(golden / "llama"))
        assert [type(config) for config in models] == [CustomConfig]
        assert_equal(load_pretrained(path, config=models[0]), reference(golden / "llama"))
    assert len(models) == 2


@pytest.mark.parametrize("vocab", [256, 260])
def test_changing_the_import_is_enough(golden, vocab):
    """shardplan's converter replaces Levanter's, and resizes the vocabulary to the tokenizer if Levanter's does."""
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from transformers import LlamaConfig as HfLlamaConfig

    path, tokenizer = str(golden / "llama"), word_tokenizer(vocab)
    converter = HFCheckpointConverter(LlamaConfig, path, HfConfigClass=HfLlamaConfig, tokenizer=tokenizer)
    with jax.set_mesh(mesh_of(1, 4, 2)), hax.axis_mapping({"mlp": "model"}):
        module = converter.load_pretrained(LlamaLMHeadModel, dtype=jnp.bfloat16)
    assert module.Vocab.size == 256
    expected = reference(golden / "llama", jnp.bfloat16)
    head = np.asarray(module.lm_head.weight.array)
    np.testing.assert_array_equal(head[:256], expected["lm_head.weight"])


@pytest.mark.quick
def test_scalars_and_empty_arrays(tmp_path):
    """Arrays without elements or without dimensions are loaded."""
    import equinox as eqx
    from haliax.state_dict import ModuleWithStateDictSerialization

    class Odd(ModuleWithStateDictSerialization):
        scalar: jax.Array
        empty: hax.NamedArray

    embed = hax.Axis("embed", 0)
    template = eqx.filter_eval_shape(lambda: Odd(jnp.zeros(()), hax.zeros(embed)))
    save_file({"scalar": np.float32(3.5).reshape(()), "empty": np.zeros(0, np.float32)}, tmp_path / "model.safetensors")
    for dtype in (None, "bfloat16"):
        loaded, _ = stream_checkpoint(template, open_folder(str(tmp_path)), mesh_of(1, 2, 2), {}, dtype)
        assert float(loaded.scalar) == 3.5 and loaded.empty.array.shape == (0,)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("mapping", [{"embed": "data", "mlp": "model"}, {"mlp": ("model", "data")}, {}, None])
def test_every_byte_is_read_once(golden, monkeypatch, name, mapping):
    """The file is read once for shards that interleave on disk, for contiguous shards, and for replicated arrays."""
    sizes = []
    original = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile,
        "read_into",
        lambda self, offset, buffer: sizes.append(len(buffer)) or original(self, offset, buffer),
    )
    monkeypatch.setattr(LocalFile, "tuning", ReadTuning(4096, 3))
    tensors = read_index(open_folder(str(golden / name)))
    sizes.clear()
    template = template_of(golden / name)
    read = sum(tensor.nbytes for tensor in tensors.values())
    with jax.set_mesh(mesh_of(1, 4, 2)):
        stream_checkpoint(template, open_folder(str(golden / name)), mesh_of(1, 4, 2), mapping, None)
    # the index, and one read for the header of each file; config.json says whether they hold codes
    headers = sum(sizes[: 1 + len({tensor.file.name for tensor in tensors.values()})])
    assert sum(sizes) - headers == read + (golden / name / "config.json").stat().st_size


def test_plan_and_mapping_together_are_refused(golden, make_config, raises_message):
    plan = make_plan(make_config(model_ref=golden / "llama", workload_position=64))
    with raises_message(ConfigError):
        load_pretrained(str(golden / "llama"), plan=plan, axis_mapping={})


def test_a_plan_of_another_model_is_refused(golden, make_config, raises_message):
    plan = make_plan(make_config(model_ref=golden / "llama", workload_position=64))
    with raises_message(ConfigError):
        load_pretrained(str(golden / "mistral"), plan=plan)
    with raises_message(ConfigError):
        load_pretrained(str(golden / "llama"), plan="plan.json")


def test_no_mesh_is_one_clear_line(golden, raises_message):
    with raises_message(ConfigError):
        load_pretrained(str(golden / "llama"))


def test_no_array_is_unsharded_unless_replicated(golden, monkeypatch):
    """Host memory is allocated shard by shard, exactly the bytes of the distinct shards."""
    allocated = []
    original = destination._allocate_aligned
    monkeypatch.setattr(destination, "_allocate_aligned", lambda *args: allocated.append(args[0]) or original(*args))
    template, folder = template_of(golden / "llama"), open_folder(str(golden / "llama"))
    mapping = {"embed": "data", "mlp": "model", "vocab": "model", "kv_head": "model", "heads": "model"}
    module, _ = stream_checkpoint(template, folder, mesh_of(1, 2, 4), mapping, None)
    weight = module.transformer.layers.stacked.mlp.up_proj.weight.array
    assert (2, 32, 48) in allocated and (2, 128, 96) not in allocated
    assert sum(math.prod(shape) for shape in allocated) == sum(
        math.prod(leaf.array.shape) for _, leaf in named_leaves(module)
    )
    assert weight.addressable_shards[0].data.shape == (2, 32, 48)


def test_checksums_are_compared(golden, tmp_path, capsys, raises_message):
    """The digests that name the files of the hub's cache are compared; a file under a wrong digest is refused."""
    for file in golden.joinpath("llama").glob("model*"):
        blob = tmp_path / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(file.read_bytes())
        (tmp_path / file.name).symlink_to(blob)
    (tmp_path / "config.json").write_bytes((golden / "llama" / "config.json").read_bytes())
    with jax.set_mesh(mesh_of(1, 2, 2)):
        module = load_pretrained(str(tmp_path), checksum=True)
    assert_equal(module, reference(golden / "llama"))
    assert "checksums: sha256 matches for 3 of 3 files" in capsys.readouterr().err
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs" / ("0" * 64))
    shard.resolve().write_bytes((golden / "llama" / shard.name).read_bytes())
    with (
        jax.set_mesh(mesh_of(1, 2, 2)),
        raises_message(CheckpointError),
    ):
        load_pretrained(str(tmp_path), checksum=True)
