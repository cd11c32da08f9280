"""Codes that become numbers on the devices are, bit for bit, what becomes of them while they are read."""

import itertools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from coded_checkpoints import MemoryFile, quantized, write_stored
from exchange_schedules import make_exchange_schedule
from safetensors.numpy import load_file
from stored_forms import CASES, decoded

from shardplan.checkpoint import load
from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor, GroupValues
from shardplan.checkpoint.format.header import UINT4, Tensor
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.views import stack, tensor_view
from shardplan.checkpoint.transfer import load_plan, stream
from shardplan.checkpoint.transfer.coded_requests import with_codes
from shardplan.checkpoint.transfer.devices import decoding
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.runtime.processes.group import open_process_group
from shardplan.storage import open_folder

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
E4M3, E2M1 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float4_e2m1fn)
CODES = {"deepseek_v3_fp8": E4M3, "gpt_oss_mxfp4": E2M1, "kimi_int4": UINT4}
TYPES = [*zip(CODES, ("float32", "bfloat16", "bfloat16"), strict=True)]
MAPPINGS = [
    {},
    {"embed": "data", "mlp": "model", "expert_mlp": "model", "kv_head": "model"},
    {"experts": ("data", "model"), "embed": "model", "head_size": "data"},
]


def numbers(folder, sizes, mapping, dtype):
    """Load the checkpoint in `folder`: array path -> array."""
    opened = open_folder(str(folder))
    template = build_model(read_config(None, opened), 8).template
    count = int(np.prod(sizes))
    axes = dict(zip(("replica", "data", "model"), sizes, strict=True))
    mesh = arrange(jax.devices()[:count], parse_slice(f"cpu-{count}"), axes)
    divisible = keep_divisible(template, mapping, mesh)
    model, _ = stream_checkpoint(template, opened, mesh, divisible, dtype)
    return {path: np.asarray(leaf.array) for path, leaf in named_leaves(model)}


def keep_divisible(template, mapping, mesh):
    """The entries of a mapping whose mesh axes divide every axis of the model."""
    axes = {axis for _, leaf in named_leaves(template) for axis in leaf.axes}
    kept = {}
    for name, mesh_axes in mapping.items():
        shards = np.prod([mesh.shape[axis] for axis in ((mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes)])
        if all(axis.size % shards == 0 for axis in axes if axis.name == name):
            kept[name] = mesh_axes
    return kept


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        assert found[path].dtype == values.dtype
        np.testing.assert_array_equal(found[path], values, err_msg=path)


def quick(cases, every):
    """One of so many cases runs always, the others with --whole."""
    return [pytest.param(*case, marks=[pytest.mark.whole] if i % every != 4 else []) for i, case in enumerate(cases)]


@pytest.fixture
def small_transfers(monkeypatch):
    monkeypatch.setattr(load_plan, "MAX_READ_BYTES", 20_000)
    monkeypatch.setattr(load_plan, "MAX_PLACED_BYTES", 60_000)
    monkeypatch.setattr(decoding, "SLAB_CODES", 500)


@pytest.mark.parametrize(
    ("mapping", "name", "dtype"),
    quick(((mapping, *kind) for mapping in MAPPINGS for kind in TYPES), every=9),
)
def test_accelerators_receive_codes(monkeypatch, small_transfers, name, dtype, mapping):
    """Those of one process, to whose memory every part is sent."""
    expected = numbers(FAMILIES / name, (1, 2, 2), mapping, dtype)
    original = stream.stream_arrays
    monkeypatch.setattr(load, "stream_arrays", lambda *args, **more: original(*args, **more, zero_copy=False))
    sent = record_types(monkeypatch)
    assert_equal(numbers(FAMILIES / name, (1, 2, 2), mapping, dtype), expected)
    assert sent == {CODES[name]}


@pytest.mark.parametrize(
    ("mapping", "name", "sizes"),
    quick(itertools.product(MAPPINGS, CODES, [(1, 2, 4), (1, 3, 2), (1, 1, 5)]), every=7),
)
def test_processes_exchange_codes(monkeypatch, small_transfers, name, sizes, mapping):
    """In one byte each, and not as numbers, on any mesh."""
    expected = numbers(FAMILIES / name, sizes, mapping, "bfloat16")
    exchanged = force_exchange(monkeypatch)
    assert_equal(numbers(FAMILIES / name, sizes, mapping, "bfloat16"), expected)
    assert CODES[name] in exchanged


def record_types(monkeypatch):
    """The types of what devices exchange, or make numbers of."""
    found, original = set(), stream.exchange_rows
    monkeypatch.setattr(stream, "exchange_rows", lambda *args: found.add(args[3]) or original(*args))
    return found


def force_exchange(monkeypatch):
    """Let devices exchange what they have read, and send codes; returns the types that they exchange."""
    monkeypatch.setattr(load_plan, "sends_codes", lambda mesh, zero_copy: True)
    monkeypatch.setattr(load_plan, "make_schedule", make_exchange_schedule)
    return record_types(monkeypatch)


@pytest.mark.parametrize(
    ("block", "mapping"), quick(itertools.product([(128, 128), None, (20, 28)], MAPPINGS[1:]), every=6)
)
def test_blocks_that_shards_divide(golden, monkeypatch, tmp_path, small_transfers, block, mapping):
    """The ends of shards and of transfers are inside blocks, which are rows where config.json names none."""
    tensors = {
        name: value for file in (golden / "llama").glob("*.safetensors") for name, value in load_file(file).items()
    }
    # a row is a block where config.json names none
    coded = quantized(tensors, block or (1, 10**6))
    method = {"quant_method": "fp8"} | ({} if block is None else {"weight_block_size": block})
    config = json.loads((golden / "llama" / "config.json").read_text()) | {"quantization_config": method}
    folder = write_stored(tmp_path / "coded", coded, config)
    expected = numbers(folder, (1, 2, 4), mapping, "float32")
    exchanged = force_exchange(monkeypatch)
    assert_equal(numbers(folder, (1, 2, 4), mapping, "float32"), expected)
    assert E4M3 in exchanged


SENT = {
    "packed-4-16-symmetric": UINT4, "packed-8-None-symmetric": np.dtype(np.uint8), "nvfp4": E2M1,
    "modelopt-nvfp4": E2M1, "int8": np.dtype(np.int8), "fp8-rows": E4M3, "fp8-tensor": E4M3, "fp8-blocks": E4M3,
    "gptq-4-16-in-order": np.dtype(np.float32), "awq": np.dtype(np.float32), "packed-4-16-zeros": np.dtype(np.float32),
}  # fmt: skip
"""Ways to store weights -> what is sent: codes, or numbers where these have zero points of their own."""


@pytest.mark.parametrize("case", SENT)
def test_every_way_to_store_weights(monkeypatch, small_transfers, case):
    """Against decoders in NumPy: rows and columns are sharded, and the array has a transposed part before it."""
    make, *arguments = CASES[case]
    config, stored, expected = make(*arguments)
    index, _ = decoded(config, stored)
    weight = index.tensors["w.weight"]
    view = weight.view("w.weight") or tensor_view("w.weight", weight.shape)
    sent = force_exchange(monkeypatch)
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    requests = {
        "columns": ArrayRequest(view, ((), ("model",)), np.dtype(np.float32)),
        "both": ArrayRequest(stack([view, view], 0), ((), ("data",), ("model",)), np.dtype(np.float32)),
        "narrow": ArrayRequest(view.transpose((1, 0)), (("data",), ()), np.dtype(np.float16)),
    }
    with open_process_group() as processes:
        arrays = stream.stream_arrays(requests, index.tensors, mesh, processes)
    assert arrays.keys() == requests.keys()
    np.testing.assert_array_equal(np.asarray(arrays["columns"]), expected)
    np.testing.assert_array_equal(np.asarray(arrays["both"]), np.stack([expected, expected]))
    np.testing.assert_array_equal(np.asarray(arrays["narrow"]), expected.T.astype(np.float16))
    assert sent == {SENT[case], np.dtype(np.float32), np.dtype(np.float16)}


@pytest.mark.parametrize("shards", [1, 4, 64])
def test_scales_are_sharded_as_the_array_is(shards):
    """Also where the ends of shards are inside blocks: 224 of 32 codes over 64 devices."""
    weight = CODED_MATRIX
    request = ArrayRequest(tensor_view("w", weight.shape), ((), ("data",)), np.dtype(ml_dtypes.bfloat16))
    requests, _ = with_codes({"w": request}, {"w": weight}, {"data": shards})
    scales = requests["w.scales"]
    assert [*requests] == ["w.scales", "w"] and scales.spec == request.spec
    assert scales.view.shape == (16, 448 if shards == 64 else 224)


CODED_MATRIX = CodedTensor(
    MemoryFile(b""), 0, (16, 7168), E2M1, code_dims=(16, 7168), group=(1, 32),
    scale=GroupValues("s", Tensor(MemoryFile(b""), 0, (16, 224), np.dtype(np.float32)), (224, 1)),
)  # fmt: skip


def test_few_codes_with_a_scale_travel_as_numbers():
    request = ArrayRequest(tensor_view("w", (16, 7168)), ((), ("data",)), np.dtype(ml_dtypes.bfloat16))
    requests, sources = with_codes({"w": request}, {"w": CODED_MATRIX}, {"data": 7168 // 8})
    assert requests == {"w": request} and sources.keys() == {"w"}
