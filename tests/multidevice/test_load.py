"""Loaded models equal Levanter's conversion of what the official safetensors library reads, on any mesh, any type."""

import hashlib
import math
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from shardplan import HFCheckpointConverter, best_effort_sharding, load_pretrained
from shardplan.checkpoint import load
from shardplan.checkpoint.format.index import read_index
from shardplan.checkpoint.load import stream_model
from shardplan.checkpoint.transfer import destination, stream
from shardplan.checkpoint.transfer.schedule import Schedule, Sharing, sharings, transfers_of
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model import build_model, read_config
from shardplan.model.axes import named_leaves
from shardplan.search.make_plan import make_plan
from shardplan.storage import open_folder
from shardplan.storage.folder import Pace
from shardplan.storage.local import LocalFile


def template_of(folder: Path):
    return build_model(read_config(str(folder / "config.json"), None), 64).template


def reference(folder: Path, dtype=None) -> dict[str, np.ndarray]:
    """Every array of the model, whole, by the official library and Levanter's converter."""
    state = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state.update(load_file(shard))
    state = {name.removeprefix("transformer."): jnp.asarray(value) for name, value in state.items()}
    model = from_torch_compatible_state_dict(template_of(folder), state)
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


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "qwen2"])
@pytest.mark.parametrize("sizes", [(1, 3, 1), (1, 1, 5), (1, 3, 2), (2, 2, 2), (1, 1, 1)])
def test_best_effort_load(golden, name, sizes):
    mesh = mesh_of(*sizes)
    with jax.set_mesh(mesh):
        module = load_pretrained(None, str(golden / name))
    assert_equal(module, reference(golden / name))
    for _, leaf in named_leaves(module):
        assert leaf.array.sharding == best_effort_sharding(leaf.array.shape, mesh)


@pytest.mark.parametrize("chunk_bytes", [700, 4096])
@pytest.mark.parametrize(
    "mapping",
    [
        {"embed": "data", "mlp": "model"},  # cuts inner dimensions: shards interleave on disk
        {"mlp": ("model", "data"), "experts": "replica"},
        {"embed": ("replica", "data", "model")},
        {},
    ],
)
def test_any_chunk_size_and_mapping(golden, monkeypatch, chunk_bytes, mapping):
    monkeypatch.setattr(LocalFile, "pace", Pace(chunk_bytes, 3))
    monkeypatch.setattr(stream, "TRANSFER_BYTES", 8 * chunk_bytes)
    folder = golden / "mixtral"
    with jax.set_mesh(mesh_of(2, 2, 2)):
        module = load_pretrained(None, str(folder), axis_mapping=mapping)
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
        if (i + j) % 2 == 0
    ],
)
def test_devices_that_read_rows_and_exchange(golden, monkeypatch, name, sizes, mapping):
    """What the devices of several processes do: on any mesh, in any order of dimensions, with rows left over."""
    template, folder, mesh = template_of(golden / name), open_folder(str(golden / name)), mesh_of(*sizes)
    exchanged = []
    original = stream.exchange

    def shared(views, sources, specs, itemsizes, fleet, most_bytes):
        found = []
        for path, view in views.items():
            ways = [Sharing(tuple(specs[path])), *sharings(view.shape, specs[path], fleet)]
            most = max(ways, key=lambda way: len(way.steps))
            found += transfers_of(path, view.shape, most, itemsizes[path], fleet, most_bytes)
        return Schedule(fleet, tuple(found))

    monkeypatch.setattr(stream, "make_schedule", shared)
    monkeypatch.setattr(stream, "exchange", lambda *given: exchanged.append(given[1]) or original(*given))
    monkeypatch.setattr(stream, "TRANSFER_BYTES", 20_000)
    assert_equal(
        stream_model(template, folder, mesh, divisible(template, mapping, mesh), None), reference(golden / name)
    )
    assert len({transfer.path for transfer in exchanged}) > 3


def divisible(template, mapping, mesh):
    """`mapping` without what does not divide an axis of the model."""
    axes = {axis for _, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray) for axis in leaf.axes}

    def count(cut):
        return math.prod(mesh.shape[axis] for axis in ((cut,) if isinstance(cut, str) else cut))

    return {name: cut for name, cut in mapping.items() if all(a.size % count(cut) == 0 for a in axes if a.name == name)}


@pytest.mark.parametrize(
    ("mapping", "dtype"),
    [*((mapping, None) for mapping in MAPPINGS), (MAPPINGS[0], "float32"), (MAPPINGS[1], "bfloat16")],
)
def test_devices_with_memory_of_their_own(golden, monkeypatch, mapping, dtype):
    """As accelerators are filled: parts are put on the device and written into the shard there, cast where it is
    narrower, with several parts on their way."""
    template, folder, mesh = template_of(golden / "mixtral"), open_folder(str(golden / "mixtral")), mesh_of(1, 2, 2)
    whole = stream.stream_arrays
    monkeypatch.setattr(load, "stream_arrays", lambda *given: whole(*given, adopts=False))
    monkeypatch.setattr(stream, "TRANSFER_BYTES", 20_000)
    module = stream_model(template, folder, mesh, divisible(template, mapping, mesh), dtype)
    assert_equal(module, reference(golden / "mixtral", dtype and jnp.dtype(dtype)))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [None, "float32", "float16", "bfloat16"])
def test_casts(golden, tmp_path, stored, wanted):
    (tmp_path / "config.json").write_bytes((golden / "llama" / "config.json").read_bytes())
    state = {}
    for shard in sorted((golden / "llama").glob("*.safetensors")):
        state.update(load_file(shard))
    save_file({name: value.astype(stored) for name, value in state.items()}, tmp_path / "model.safetensors")
    with jax.set_mesh(mesh_of(1, 2, 4)):
        module = load_pretrained(None, str(tmp_path), axis_mapping={"embed": "data", "mlp": "model"}, dtype=wanted)
    assert_equal(module, reference(tmp_path, None if wanted is None else jnp.dtype(wanted)))


def test_plan_drives_the_load(golden, make_config):
    config = make_config(model_ref=golden / "llama", workload_position=64, mesh_data=2, mesh_model=4)
    plan = make_plan(config)
    module = load_pretrained(None, str(golden / "llama"), plan=plan)
    assert_equal(module, reference(golden / "llama", jnp.bfloat16))
    leaves = dict(named_leaves(module))
    for parameter in plan.parameters:
        array = leaves[parameter.path].array
        spec = PartitionSpec(*(tuple(axes) if axes else None for axes in parameter.spec))
        assert array.sharding.is_equivalent_to(jax.NamedSharding(array.sharding.mesh, spec), array.ndim)
        assert array.addressable_shards[0].data.nbytes == parameter.bytes_per_device


def test_levanter_configuration_and_current_mapping(golden):
    config = build_model(read_config(str(golden / "llama" / "config.json"), None), 64).config
    with jax.set_mesh(mesh_of(1, 4, 2)), hax.axis_mapping({"mlp": "model"}):
        module = load_pretrained(config, str(golden / "llama"))
    assert_equal(module, reference(golden / "llama"))
    assert module.transformer.layers.stacked.mlp.up_proj.weight.array.sharding.spec == PartitionSpec(
        None, "model", None
    )


@pytest.mark.parametrize("vocab", [256, 260])
def test_changing_the_import_is_enough(golden, vocab):
    """Our converter in the place of Levanter's, with its resizing of the vocabulary to the tokenizer."""
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    )
    path = str(golden / "llama")
    converter = HFCheckpointConverter(LlamaConfig, path, HfConfigClass=HfLlamaConfig, tokenizer=tokenizer)
    with jax.set_mesh(mesh_of(1, 4, 2)), hax.axis_mapping({"mlp": "model"}):
        module = converter.load_pretrained(LlamaLMHeadModel, dtype=jnp.bfloat16)
    assert module.Vocab.size == vocab
    expected = reference(golden / "llama", jnp.bfloat16)
    head = np.asarray(module.lm_head.weight.array)
    np.testing.assert_array_equal(head[:256], expected["lm_head.weight"])


def test_scalars_and_empty_arrays(tmp_path):
    """Arrays without elements or without dimensions, and one that is only a part of a larger model."""
    import equinox as eqx
    from haliax.state_dict import ModuleWithStateDictSerialization

    class Odd(ModuleWithStateDictSerialization):
        scalar: jax.Array
        empty: hax.NamedArray

    embed = hax.Axis("embed", 0)
    template = eqx.filter_eval_shape(lambda: Odd(jnp.zeros(()), hax.zeros(embed)))
    save_file({"scalar": np.float32(3.5).reshape(()), "empty": np.zeros(0, np.float32)}, tmp_path / "model.safetensors")
    for dtype in (None, "bfloat16"):
        loaded = stream_model(template, open_folder(str(tmp_path)), mesh_of(1, 2, 2), {}, dtype)
        assert float(loaded.scalar) == 3.5 and loaded.empty.array.shape == (0,)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("mapping", [{"embed": "data", "mlp": "model"}, {"mlp": ("model", "data")}, {}, None])
def test_every_byte_is_read_once(golden, monkeypatch, name, mapping):
    """Whatever the sharding: shards that interleave on disk, contiguous shards, copies on every device."""
    counted = []
    original = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile,
        "read_into",
        lambda self, offset, buffer: counted.append(len(buffer)) or original(self, offset, buffer),
    )
    monkeypatch.setattr(LocalFile, "pace", Pace(4096, 3))
    tensors = read_index(open_folder(str(golden / name)))
    counted.clear()
    template = template_of(golden / name)
    read = sum(tensor.nbytes for tensor in tensors.values())
    with jax.set_mesh(mesh_of(1, 4, 2)):
        stream_model(template, open_folder(str(golden / name)), mesh_of(1, 4, 2), mapping, None)
    headers = sum(counted[: 1 + 2 * len({tensor.file.name for tensor in tensors.values()})])
    assert sum(counted) - headers == read


def test_plan_and_mapping_together_are_refused(golden, make_config):
    plan = make_plan(make_config(model_ref=golden / "llama", workload_position=64))
    with pytest.raises(ConfigError, match="takes a plan or an axis_mapping, not both"):
        load_pretrained(None, str(golden / "llama"), plan=plan, axis_mapping={})


def test_no_mesh_is_one_clear_line(golden):
    with pytest.raises(ConfigError, match="load_pretrained needs a mesh: pass plan="):
        load_pretrained(None, str(golden / "llama"))


def test_nothing_is_whole_unless_its_sharding_says_so(golden, monkeypatch):
    """Host memory is allocated shard by shard: together exactly the bytes of the distinct shards."""
    allocated = []
    original = destination._aligned
    monkeypatch.setattr(destination, "_aligned", lambda shape, dtype: allocated.append(shape) or original(shape, dtype))
    template, folder = template_of(golden / "llama"), open_folder(str(golden / "llama"))
    mapping = {"embed": "data", "mlp": "model", "vocab": "model", "kv_head": "model", "heads": "model"}
    module = stream_model(template, folder, mesh_of(1, 2, 4), mapping, None)
    weight = module.transformer.layers.stacked.mlp.up_proj.weight.array
    assert (2, 32, 48) in allocated and (2, 128, 96) not in allocated
    assert sum(math.prod(shape) for shape in allocated) == sum(
        math.prod(leaf.array.shape) for _, leaf in named_leaves(module)
    )
    assert weight.addressable_shards[0].data.shape == (2, 32, 48)


def test_checksums_are_compared(golden, tmp_path, capsys):
    """With the digests that name the files of the hub's cache; one of them is of another file."""
    for file in golden.joinpath("llama").glob("model*"):
        blob = tmp_path / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(file.read_bytes())
        (tmp_path / file.name).symlink_to(blob)
    (tmp_path / "config.json").write_bytes((golden / "llama" / "config.json").read_bytes())
    with jax.set_mesh(mesh_of(1, 2, 2)):
        module = load_pretrained(None, str(tmp_path), checksum=True)
    assert_equal(module, reference(golden / "llama"))
    assert "checksums: the sha256 on record is that of 3 of 3 files" in capsys.readouterr().err
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs" / ("0" * 64))
    shard.resolve().write_bytes((golden / "llama" / shard.name).read_bytes())
    with (
        jax.set_mesh(mesh_of(1, 2, 2)),
        pytest.raises(CheckpointError, match=f"{shard.name}: is sha256 .*, and sha256 0000.* is on record"),
    ):
        load_pretrained(None, str(tmp_path), checksum=True)
