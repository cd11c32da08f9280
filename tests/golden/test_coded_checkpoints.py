"""Checkpoints whose weights are stored as codes: every weight equals the codes times scales, and so do logits."""

import itertools
import json
from pathlib import Path

import haliax as hax
import jax
import ml_dtypes
import numpy as np
import pytest
from coded_checkpoints import SCALE as SCALE_SUFFIX
from coded_checkpoints import (
    MemoryFile,
    dequantized,
    of_each_element,
    quantized,
    read_stored,
    write_stored,
)
from coded_checkpoints import (
    numbers_of as numbers_of_four_bits,
)
from conftest import run
from test_logits import MESHES, deviation

from shardplan.checkpoint.format.codecs.decode_index import decode_index
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.load import stream_checkpoint
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.checkpoint.transfer.reads.reading import ReadTarget, plan_reads, run_read
from shardplan.errors import CheckpointError, ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.dtypes.kept_weights import numbers_of
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.quantization import ByteCodes
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model
from shardplan.runtime.devices import arrange
from shardplan.storage import open_folder

FOLDER = Path(__file__).with_name("families")
FP8 = "deepseek_v3_fp8"


def tolerance(name):
    """Twice the error of transformers in float32, for sums in another order."""
    return 2 * float(np.load(FOLDER / name / "golden.npz")["own_error"]) + 1e-6


CODED = (FP8, "gpt_oss_mxfp4", "kimi_int4", "llama_awq", "llama_gptq")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.whole] if (i + j) % 4 else [])
        for (i, name), (j, mesh) in itertools.product(enumerate(CODED), enumerate(MESHES))
    ],
)
def test_logits_equal_the_reference(make_config, name, mesh):
    assert deviation(FOLDER, make_config, name, mesh) <= tolerance(name)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.whole] if i % 2 else []) for i, mesh in enumerate(MESHES)]
)
def test_logits_of_kept_weights(make_config, mesh):
    assert deviation(FOLDER, make_config, FP8, mesh, load_keep_dtype=True) <= tolerance(FP8)


def read(folder, dtype="float32", sizes=(1, 2, 4), mapping=None):
    """Load the checkpoint in `folder`: array path -> array."""
    opened = open_folder(str(folder))
    template = build_model(read_config(None, opened), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), dict(zip(("replica", "data", "model"), sizes, strict=True)))
    model, _ = stream_checkpoint(template, opened, mesh, mapping, dtype)
    return {path: np.asarray(leaf.array) for path, leaf in named_leaves(model)}


E4M3 = ml_dtypes.float8_e4m3fn
CONFIG = json.loads((FOLDER / FP8 / "config.json").read_text())
STORED = read_stored(FOLDER / FP8 / "model.safetensors")
WEIGHT = "model.layers.1.mlp.experts.0.down_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


@pytest.mark.parametrize("mapping", [None, {"embed": ["model"], "mlp": ["data"], "experts": ["data"]}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_codes_and_scales(tmp_path, dtype, mapping):
    """Bit for bit in float32, and rounded once in bfloat16, whatever is sharded: blocks are divided among devices."""
    plain = write_stored(tmp_path / "plain", dequantized(STORED), CONFIG | {"quantization_config": None})
    expected, found = read(plain, dtype, mapping=mapping), read(FOLDER / FP8, dtype, mapping=mapping)
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


def keep(folder, mapping, param_mapping, dtype="float32"):
    """Load the checkpoint in `folder` with kept weights: array path -> array, and path -> array of the numbers."""
    opened = open_folder(str(folder))
    template = build_model(read_config(None, opened, keeps_dtype=True), 8).template
    mesh = arrange(jax.devices(), parse_slice("cpu-8"), {"replica": 1, "data": 2, "model": 4})
    model, _ = stream_checkpoint(template, opened, mesh, param_mapping, dtype)
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        numbers = jax.jit(lambda model: numbers_of(model, dtype))(model)
    return ({path: leaf.array for path, leaf in named_leaves(each)} for each in (model, numbers))


@pytest.mark.parametrize(
    ("mapping", "param_mapping"),
    [
        ({}, {}),
        ({"mlp": ["model"], "kv_head": ["model"]}, {"mlp": ["model"], "kv_head": ["model"], "embed": ["data"]}),
        ({"experts": ["data"], "expert_mlp": ["model"]}, {"experts": ["data"], "expert_mlp": ["model"]}),
    ],
)
def test_kept_weights_are_codes_on_the_devices(mapping, param_mapping):
    """One byte for each, and their numbers are bit for bit those that are loaded without keeping them."""
    arrays, numbers = keep(FOLDER / FP8, mapping, param_mapping)
    expected = read(FOLDER / FP8)
    assert numbers.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(np.asarray(numbers[path]), values, err_msg=path)
    coded = {path: array for path, array in arrays.items() if path not in expected}
    assert {path.rpartition(".")[2]: str(array.dtype) for path, array in coded.items()} == {
        "codes": "float8_e4m3fn", "scales": "float32"
    }  # fmt: skip
    stored = sum(tensor.nbytes for name, tensor in STORED.items() if tensor.dtype == E4M3)
    assert sum(array.nbytes for path, array in coded.items() if path.endswith("codes")) == stored


@pytest.mark.parametrize(
    ("block", "dtype"), [([48, 24], E4M3), ([128, 128], E4M3), (None, E4M3), ([32, 16], ml_dtypes.float8_e5m2)], ids=str
)
def test_numbers_of_kept_weights(tmp_path, block, dtype):
    """Of blocks that do not divide the weights, of rows, and of other codes: those that NumPy computes."""
    plain = {name: each.astype(np.float32) for name, each in dequantized(STORED).items()}
    layers = {name: each for name, each in plain.items() if name + SCALE_SUFFIX in STORED}
    shape = [1, 10_000] if block is None else block
    coded = quantized(layers, shape, dtype)
    fmt = "e4m3" if dtype is E4M3 else "e5m2"
    config = {"quant_method": "fp8", "fmt": fmt, "weight_block_size": block}
    folder = write_stored(tmp_path / "ck", plain | coded, CONFIG | {"quantization_config": config})
    _, numbers = keep(folder, {"embed": ["model"]}, {"embed": ["model"]})
    expected = dequantized(coded, shape)
    found = read(write_stored(tmp_path / "plain", plain | expected, CONFIG | {"quantization_config": None}))
    assert numbers.keys() == found.keys()
    for path, values in found.items():
        np.testing.assert_array_equal(np.asarray(numbers[path]), values, err_msg=path)


def plain_experts(tensors):
    """The projections down of all experts as numbers, without their scales."""
    numbers = dequantized(tensors)
    names = [name for name in tensors if name.endswith("down_proj.weight")]
    for name in names:
        del tensors[f"{name}_scale_inv"]
    return {name: numbers[name] for name in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({SCALE: t[SCALE] * np.nan}), rf"{SCALE} has nan as scale 0; it must be"),
        (
            lambda t: t.update(plain_experts(t)),
            r"down_proj.weight is stored as float32, and load.keep_dtype keeps it as float8_e4m3fn, as its config.json",
        ),
    ],
)
def test_damaged_kept_weights_are_refused(tmp_path, change, message):
    tensors = dict(STORED)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        keep(write_stored(tmp_path / "damaged", tensors, CONFIG), {}, {})


def test_kept_weights_are_not_written(raises_message):
    template = build_model(read_config(None, open_folder(str(FOLDER / FP8)), keeps_dtype=True), 8).template
    with raises_message(CheckpointError):
        template.to_state_dict()


@pytest.mark.quick
@pytest.mark.parametrize("name", CODED[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_four_bits(tmp_path, name, dtype):
    """Those of an independent reader, bit for bit."""
    config = json.loads((FOLDER / name / "config.json").read_text()) | {"quantization_config": None}
    numbers = numbers_of_four_bits(read_stored(FOLDER / name / "model.safetensors"))
    tensors = {key: np.float32(each) for key, each in numbers.items()}
    expected = read(write_stored(tmp_path / "plain", tensors, config), dtype)
    found = read(FOLDER / name, dtype)
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), rf"{WEIGHT} is stored as float8_e4m3fn without scales"),
        (lambda t: t.update({SCALE: t[SCALE][:1]}), rf"{SCALE} has the shape \[1, 1\] for {WEIGHT} .* \[2, 1\]"),
        (lambda t: t.update({SCALE: t[SCALE] * 0}), rf"{SCALE} has 0 as scale 0; it must be positive"),
        (lambda t: t.update({SCALE: t[SCALE] * np.nan}), rf"{SCALE} has nan as scale 0; it must be"),
        (lambda t: t.update({SCALE: -t[SCALE]}), rf"{SCALE} has -.* as scale 0; it must be"),
        (lambda t: t.update({SCALE: t[SCALE].astype(np.int32)}), r"is stored as int32; it must be floating-point"),
        (lambda t: t.update({f"{WEIGHT}_scale": t[SCALE]}), rf"with scales both in {SCALE} and in {WEIGHT}_scale"),
        (lambda t: t.update({WEIGHT: t[WEIGHT][:, :8]}), rf"{WEIGHT} has \(136, 8\), the model \(136, 16\)"),
        (
            lambda t: t.update(dequantized(STORED)),
            r"config.json says that weights are stored in fp8, and no tensor is",
        ),
    ],
)  # fmt: skip
def test_damaged_scales_are_refused(tmp_path, change, message):
    tensors = dict(STORED)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        read(write_stored(tmp_path / "damaged", tensors, CONFIG))


EXPERTS_BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
EXPERTS_SCALES = "model.layers.1.mlp.experts.down_proj_scales"
PACKED = "model.layers.1.mlp.experts.0.down_proj.weight"
LINEAR = "model.layers.1.mlp.down_proj"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt_oss_mxfp4", lambda t: t.pop(EXPERTS_SCALES), r"down_proj has codes without .*down_proj_scales"),
        (
            "gpt_oss_mxfp4",
            lambda t: t.update({EXPERTS_SCALES: t[EXPERTS_SCALES][..., :0]}),
            r"down_proj_scales has the shape \[6, 64, 0\]; with the codes of .*down_proj it is \[6, 64, \d\]",
        ),
        (
            "gpt_oss_mxfp4",
            lambda t: t.update({EXPERTS_BLOCKS: t[EXPERTS_BLOCKS][..., :8]}),
            r"down_proj_blocks has the shape \[6, 64, \d, 8\]; its last dimension is 16",
        ),
        ("gpt_oss_mxfp4", lambda t: t.update({EXPERTS_SCALES: t[EXPERTS_SCALES] * 0 + 255}), "has nan as scale 0"),
        ("kimi_int4", lambda t: t.pop(f"{PACKED}_scale"), r"down_proj has codes without .*down_proj.weight_scale"),
        (
            "kimi_int4",
            lambda t: t.update({f"{PACKED}_scale": t[f"{PACKED}_scale"][:, :0]}),
            r"weight_scale has the shape \[64, 0\]; with the codes of .*down_proj it is \[64, 1\]",
        ),
        (
            "kimi_int4",
            lambda t: t.update({f"{PACKED}_packed": t[f"{PACKED}_packed"][:32]}),
            r"weight_scale has the shape \[64, 1\]; with the codes of .*down_proj it is \[32, 1\]",
        ),
        ("llama_awq", lambda t: t.pop(f"{LINEAR}.qzeros"), r"down_proj has codes without .*down_proj.qzeros"),
        ("llama_awq", lambda t: t.pop(f"{LINEAR}.qweight"), r"down_proj.*qzeros, .*scales"),
        (
            "llama_gptq",
            lambda t: t.update({f"{LINEAR}.scales": t[f"{LINEAR}.scales"][:2]}),
            r"down_proj.scales has the shape \[2, 64\]; with the codes of .*down_proj it is \[3, 64\]",
        ),
        (
            "llama_gptq",
            lambda t: t.update({f"{LINEAR}.qweight": t[f"{LINEAR}.qweight"].astype(np.int64)}),
            r"down_proj.qweight is stored as int64; it must be int32",
        ),
    ],
)
def test_damaged_codes_of_four_bits_are_refused(tmp_path, name, change, message):
    config = json.loads((FOLDER / name / "config.json").read_text())
    tensors = dict(read_stored(FOLDER / name / "model.safetensors"))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        read(write_stored(tmp_path / "damaged", tensors, config))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quant_method": "gguf"}, ConfigError, r"a quantization_config \(gguf\), and weights that are quantized so"),
        ({"fmt": "e3m4"}, ConfigError, r"quantization_config.fmt is 'e3m4'"),
        ({"weight_block_size": [128]}, ConfigError, r"weight_block_size is \[128\]; it must be two positive integers"),
        ({"weight_block_sizes": [64, 64]}, ConfigError, r"quantization_config.weight_block_sizes is not known"),
        ({"modules_to_not_convert": "lm_head"}, ConfigError, r"modules_to_not_convert is 'lm_head'; it must be a list"),
        ({"weight_block_size": [64, 128]}, CheckpointError, r"with blocks of \[64, 128\] it has \[\d+, \d+\]"),
        ({"weight_block_size": None}, CheckpointError, r"with a scale for each tensor, matrix or row it has"),
        ({"modules_to_not_convert": ["o_proj"]}, CheckpointError, r"o_proj.weight is stored as .* it is not quantized"),
        (None, CheckpointError, r"it is quantised \(.*_scale_inv\)"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(tmp_path, changes, error, message):
    """Of config.json with itself, and with the files."""
    quantization = None if changes is None else {**CONFIG["quantization_config"], **changes}
    with pytest.raises(error, match=message):
        read(write_stored(tmp_path / "ck", STORED, CONFIG | {"quantization_config": quantization}))


@pytest.mark.parametrize(
    ("block", "shape"),
    [(None, (1, 1)), (None, ()), (None, (16, 1)), (None, (16,)), ([5, 7], (4, 4))],
    ids=["tensor", "number", "rows", "flat rows", "blocks"],
)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_form_of_scales(block, shape, fmt):
    """A tensor as it is read in pieces: transposed, in parts, in every second column, and over the ends of rows."""
    random = np.random.default_rng(1)
    dtype = np.dtype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt])
    codes = random.normal(size=(16, 24)).astype(dtype)
    scales = random.uniform(0.5, 2, shape).astype(np.float32)
    group = {(): (16, 24), (1, 1): (16, 24), (4, 4): (5, 7)}.get(shape, (1, 24))
    factors = of_each_element(
        scales.reshape([-(-n // size) for n, size in zip((16, 24), group, strict=True)]), (16, 24), group
    )
    expected = codes.astype(np.float32) * factors
    memory = MemoryFile(codes.tobytes() + scales.tobytes())
    scale = Tensor(memory, codes.nbytes, shape, scales.dtype)
    plain = Tensor(memory, 0, (16, 24), dtype)
    quantization = ByteCodes("fp8", (), dtype.name, None if block is None else tuple(block))
    index, _ = decode_index(TensorIndex({"w": plain, "w_scale": scale}), quantization, "here")
    assert [*index.tensors] == ["w"]
    view = tensor_view("w", (16, 24))
    for changed, values in (
        (view, expected),
        (view.transpose((1, 0)), expected.T),
        (view.slice((3, 5), (14, 23)), expected[3:14, 5:23]),
        (view.reshape((2, 8, 3, 8)).transpose((2, 0, 3, 1)), expected.reshape(2, 8, 3, 8).transpose(2, 0, 3, 1)),
        (view.reshape((384,)).slice((100,), (300,)), expected.reshape(384)[100:300]),
        (view.reshape((16, 12, 2)).slice((0, 0, 1), (16, 12, 2)), expected.reshape(16, 12, 2)[:, :, 1:]),
    ):
        target = ReadTarget((0,) * len(changed.shape), np.zeros(changed.shape, np.float32))
        for read_ in plan_reads(changed, index.tensors, [target], 100):
            run_read(read_)
        np.testing.assert_array_equal(target.buffer, values)


@pytest.mark.parametrize("name", [FP8, *(pytest.param(each, marks=pytest.mark.whole) for each in CODED if each != FP8)])
def test_converted_to_plain_numbers(tmp_path, name):
    """The written checkpoint is that of the numbers, without scales, and its config.json has no quantization."""
    arguments = [f"--model={FOLDER / name}", "--hardware.slice=cpu-8", "--workload.param_dtype=float32"]
    arguments += ["--workload.batch=8", "--workload.position=8", f"--to={tmp_path / 'out'}"]
    done = run("checkpoint", "convert", *arguments)
    assert done.returncode == 0, done.stderr
    written = {
        key: each for file in (tmp_path / "out").glob("*.safetensors") for key, each in read_stored(file).items()
    }
    stored = read_stored(FOLDER / name / "model.safetensors")
    expected = dequantized(stored) if name == FP8 else numbers_of_four_bits(stored)
    unneeded = {key for key in expected if name == FP8 and "layers.2" in key}  # multi-token prediction
    assert written.keys() == expected.keys() - unneeded
    for key, values in written.items():
        np.testing.assert_array_equal(values, np.float32(expected[key]), err_msg=key)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_loader_without_scales_is_refused(raises_message):
    """Levanter's own loader would take codes for numbers."""
    template = build_model(read_config(None, open_folder(str(FOLDER / FP8))), 8).template
    with raises_message(CheckpointError):
        template.from_state_dict(STORED)
