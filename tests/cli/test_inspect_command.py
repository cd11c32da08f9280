"""`shardplan checkpoint inspect`: what headers say, counted by safetensors' own reader; no weight is read."""

import json
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path

import jsonschema
import pytest
from multimodal_files import WRAPPERS, write_wrapped
from safetensors import safe_open

from shardplan.__main__ import main
from shardplan.model.bundled_configs import BUNDLED
from shardplan.storage.local import LocalFile

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "tests" / "golden" / "families"
DATA = ROOT / "tests" / "golden" / "data"
NAMES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F16": "float16", "F32": "float32", "I32": "int32", "I64": "int64",
    "U8": "uint8",
}  # fmt: skip
"""Type of safetensors -> how it is printed."""
SIZES = {"BF16": 2, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1}
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}


def closed(properties, **settings):
    """The schema of an object that has these keys, and no others."""
    return {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        **settings,
    }  # fmt: skip


def or_null(schema):
    return {"anyOf": [schema, {"type": "null"}]}


SCHEMA = closed(
    {
        "ref": TEXT,
        "files": or_null(
            closed(
                {
                    "count": COUNT,
                    "bytes": COUNT,
                    "types": {"type": "array", "items": closed({"dtype": TEXT, "tensors": COUNT, "bytes": COUNT})},
                }
            )
        ),
        "quantization": or_null({"type": "object", "required": ["form", "method", "plain_modules"]}),
        "model": or_null(
            closed(
                {
                    "type": TEXT, "wrapper": or_null(TEXT), "family": or_null(TEXT), "parameters": COUNT,
                    "layers": or_null(COUNT), "expert_layers": COUNT, "experts": or_null(COUNT),
                    "experts_per_token": or_null(COUNT), "positions": COUNT, "vocabulary": COUNT,
                    "is_tied": {"type": "boolean"},
                }
            )
        ),
        "weights": or_null(
            closed(
                {
                    "tensors": COUNT, "coded": COUNT, "bytes": COUNT, "ignored": COUNT, "ignored_bytes": COUNT,
                    "ignored_kinds": TEXT, "head": or_null(TEXT), "notes": {"type": "array", "items": TEXT},
                }
            )
        ),
        "problem": or_null(TEXT),
        "load": or_null(
            closed({"bandwidth": {"type": "number"}, "processes": COUNT, "bytes": COUNT, "seconds": {"type": "number"}})
        ),
        "devices": or_null(
            closed(
                {
                    "slice": TEXT, "count": COUNT, "mesh": {"type": "object", "additionalProperties": COUNT},
                    "parameters": COUNT, "peak": COUNT, "available": COUNT, "fits": {"type": "boolean"},
                }
            )
        ),
    }
)  # fmt: skip


def inspect(capsys, folder, *arguments, code=0):
    """The JSON of a checkpoint, what is printed beside it, and the line of the error."""
    assert main(None, ["checkpoint", "inspect", str(folder), "--json=-", *arguments]) == code
    out, err = capsys.readouterr()
    values = json.loads(out)
    jsonschema.validate(values, SCHEMA)
    lines = err.splitlines()
    assert len([line for line in lines if line.startswith("shardplan checkpoint inspect: ")]) == (code != 0)
    return values, err, lines[-1]


def headers(folder):
    """Name -> type and bytes of every tensor, by safetensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                size = SIZES[entry.get_dtype()]
                for dimension in entry.get_shape():
                    size *= dimension
                found[name] = (entry.get_dtype(), size)
    return found


@pytest.mark.parametrize(
    ("name", "unread", "codes", "ignored"),
    [
        ("data/llama", (), "none", ()),
        ("families/qwen3_moe", (), "none", ()),
        ("families/deepseek_v3_fp8", (), "_scale_inv", ()),
        ("families/gpt_oss_mxfp4", (), "_blocks", ()),
        ("families/kimi_int4", ("weight_shape",), "weight_packed", ()),
        ("families/llama_gptq", (), "qweight", ()),
        ("families/mistral3", (), "none", ("vision_tower", "multi_modal_projector")),
    ],
)
def test_counts_are_those_of_the_headers(capsys, name, unread, codes, ignored):
    """Plain, sharded with an index, in codes of several kinds, and within a model of images and text."""
    folder = ROOT / "tests" / "golden" / name
    values, _, _ = inspect(capsys, folder)
    stored = headers(folder)
    by_type = defaultdict(list)
    for dtype, size in stored.values():
        by_type[NAMES[dtype]].append(size)
    found = {each["dtype"]: (each["tensors"], each["bytes"]) for each in values["files"]["types"]}
    assert found == {dtype: (len(sizes), sum(sizes)) for dtype, sizes in by_type.items()}
    paths = list(folder.glob("*.safetensors"))
    assert (values["files"]["count"], values["files"]["bytes"]) == (len(paths), sum(p.stat().st_size for p in paths))
    weights = values["weights"]
    of_images = [size for key, (_, size) in stored.items() if key.startswith(ignored or ("none",))]
    assert (weights["ignored"], weights["ignored_bytes"]) == (len(of_images), sum(of_images))
    read = [size for key, (_, size) in stored.items() if not key.endswith(unread or ("none",))]
    assert weights["bytes"] == sum(read) - sum(of_images)
    assert weights["coded"] == sum(key.endswith(codes) for key in stored)
    if not weights["coded"]:
        assert values["quantization"] is None
        assert values["model"]["parameters"] == weights["bytes"] // 4  # all of them are float32
        assert weights["tensors"] == len(stored) - len(of_images)
    assert values["problem"] is values["load"] is values["devices"] is None


def test_a_text_model_in_codes_within_a_model_of_images(tmp_path, capsys):
    folder = write_wrapped(tmp_path / "wrapped", WRAPPERS["kimi_k25"], FAMILIES / "kimi_int4")
    values, err, _ = inspect(capsys, folder)
    plain, _, _ = inspect(capsys, FAMILIES / "kimi_int4")
    images = len(WRAPPERS["kimi_k25"].images)
    assert values["model"] == {**plain["model"], "wrapper": "kimi_k25"}
    assert values["weights"]["ignored"] == plain["weights"]["ignored"] + images
    assert values["weights"]["ignored_bytes"] == plain["weights"]["ignored_bytes"] + images * 5 * 3 * 4
    assert values["weights"]["bytes"] == plain["weights"]["bytes"]
    assert values["quantization"] == plain["quantization"]
    assert "kimi_k2, the text model of a kimi_k25 (family deepseek)" in err
    assert "compressed-tensors: integers of 4 bits with scales of groups of 32" in err


def test_what_devices_hold_and_how_long_a_load_takes(capsys, tmp_path):
    """As `plan` and `checkpoint --schedule` say; at another bandwidth by that of the process that reads the most."""
    folder, plan_file = str(DATA / "llama"), str(tmp_path / "plan.json")
    keys = ("--hardware.slice=v5e-16", "--workload.position=64", "--workload.batch=16", "--mesh.model=2")
    assert main("plan", [f"--model={folder}", *keys, f"--json={plan_file}"]) == 0
    plan = json.loads(Path(plan_file).read_text())
    assert main("checkpoint", [f"--plan={plan_file}", "--schedule", f"--json={tmp_path / 'read.json'}"]) == 0
    schedule = json.loads((tmp_path / "read.json").read_text())
    capsys.readouterr()
    values, err, _ = inspect(capsys, folder, *keys)
    parts = ("parameters", "peak", "available")
    assert {part: values["devices"][part] for part in parts} == {part: plan["memory"][part] for part in parts}
    assert (values["devices"]["mesh"], values["devices"]["count"]) == (plan["mesh"], 16)
    assert values["load"]["seconds"] == schedule["seconds"]
    assert values["load"]["bandwidth"] == schedule["network_bandwidth"]
    assert "fits v5e-16: " in err
    most = max(each["bytes"] for each in schedule["processes"].values())
    slow, err, _ = inspect(capsys, folder, f"--plan={plan_file}", "--bandwidth=0.5")
    assert slow["devices"] == values["devices"]
    assert slow["load"]["seconds"] == pytest.approx(most / 5e8)
    assert "at 0.5 GB/s each" in err
    _, _, line = inspect(capsys, DATA / "qwen2", f"--plan={plan_file}", code=2)
    assert f"the plan is for {folder} with " in line


@pytest.mark.quick
def test_scales_are_in_the_bytes_of_a_load(capsys):
    """They are read as often as the codes, of which `checkpoint --schedule` says it; shapes of tensors are not read."""
    folder = FAMILIES / "kimi_int4"
    keys = ("--hardware.slice=cpu-8", "--mesh.data=8", "--workload.position=8", "--workload.batch=8")
    assert main("checkpoint", [f"--model={folder}", *keys, "--schedule", "--json=-"]) == 0
    times_read = json.loads(capsys.readouterr().out)["times_read"]
    values, _, _ = inspect(capsys, folder, *keys, "--bandwidth=1")
    read = sum(size for name, (_, size) in headers(folder).items() if not name.endswith("weight_shape"))
    assert values["load"]["bytes"] == pytest.approx(times_read * read, abs=1)
    assert values["load"]["seconds"] == pytest.approx(times_read * read / 1e9)


def test_a_bandwidth_without_a_slice_is_that_of_one_process(capsys):
    values, _, _ = inspect(capsys, DATA / "llama", "--bandwidth", "2")
    read = sum(size for _, size in headers(DATA / "llama").values())
    assert values["load"] == {"bandwidth": 2e9, "processes": 1, "bytes": read, "seconds": read / 2e9}
    assert values["devices"] is None


def changed(tmp_path, source, **changes):
    """A copy of a checkpoint with another config.json."""
    folder = tmp_path / "changed"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "code", "message", "known"),
    [
        ({"num_hidden_layers": 3}, 4, r"does not match the model of its config.json: 9 tensors missing", "model"),
        ({"hidden_size": 32}, 4, r"does not match .* with a different shape", "model"),
        ({"model_type": "mamba"}, 2, r"config.json: model_type 'mamba' is not supported", None),
        ({"quantization_config": {"quant_method": "gguf"}}, 2, r"a quantization_config \(gguf\), and weights", None),
        ({"quantization_config": {"quant_method": "fp8"}}, 4, r"stored in fp8, and no tensor is; remove", "model"),
    ],
)
def test_what_does_not_match_is_said_in_one_line(tmp_path, capsys, changes, code, message, known):
    """With the exit code of every other command, after what is known nevertheless."""
    folder = changed(tmp_path, DATA / "llama", **changes)
    values, err, line = inspect(capsys, folder, code=code)
    assert re.search(message, line) and values["problem"] in line
    assert (values["model"] is not None) == (known == "model")
    assert values["files"]["count"] == 3 and values["weights"] is None
    assert "3 files, " in err


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_configuration(tmp_path, capsys, text):
    folder = changed(tmp_path, DATA / "llama")
    (folder / "config.json").write_text(text)
    values, err, line = inspect(capsys, folder, code=2)
    assert "config.json" in line and values["model"] is values["quantization"] is None
    assert "3 files, " in err


def test_a_damaged_header(tmp_path, capsys):
    folder = changed(tmp_path, FAMILIES / "qwen2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    values, err, line = inspect(capsys, folder, code=4)
    assert "it is truncated" in line and values["files"] is None
    assert values["model"]["type"] == "qwen2" and "parameters    " in err


def test_no_plan_fits(capsys):
    """What the checkpoint is, is printed before."""
    keys = ("--hardware.slice=v5e-1", "--workload.batch=1000000", "--workload.position=64", "--mesh.data=1")
    values, _, line = inspect(capsys, DATA / "llama", *keys, code=3)
    assert "no plan fits" in line and values["weights"]["tensors"] == 21 and values["devices"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json=-"], "inspect needs a checkpoint, as in `shardplan checkpoint inspect org/model`"),
        (["a/b", "--model", "c/d"], "it names two checkpoints, a/b and c/d; leave one out"),
        (["a/b", "--bandwidth", "0"], "bandwidth is 0.0; it must be a positive number of GB/s"),
        (["a/b", "c/d"], "unexpected argument 'c/d'"),
        (["no-such-folder"], "no-such-folder"),
    ],
)
def test_arguments_that_are_refused(capsys, arguments, message):
    assert main(None, ["checkpoint", "inspect", *arguments]) == 2
    assert message in capsys.readouterr().err


def llama_tensors(config):
    """Name -> shape of the tensors of a Llama, as Meta's releases have them."""
    embed, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = embed // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (embed, embed), "self_attn.k_proj": (keys, embed), "self_attn.v_proj": (keys, embed),
        "self_attn.o_proj": (embed, embed), "mlp.gate_proj": (mlp, embed), "mlp.up_proj": (mlp, embed),
        "mlp.down_proj": (embed, mlp), "input_layernorm": (embed,), "post_attention_layernorm": (embed,),
    }  # fmt: skip
    outer = {
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (vocab, embed),
    }
    layers = range(config["num_hidden_layers"])
    return outer | {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}


def test_no_weights_are_read(tmp_path, capsys, monkeypatch):
    """Of the 16 GB of Llama 3.1 8B, whose file is a header and a hole."""
    config = json.loads(BUNDLED["llama-3.1-8b"].read_bytes())
    entries, end = {}, 0
    for name, shape in llama_tensors(config).items():
        size = 2
        for dimension in shape:
            size *= dimension
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + end)
    read = []
    read_into = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile, "read_into", lambda self, offset, buffer: (read.append(len(buffer)), read_into(self, offset, buffer))
    )
    values, _, _ = inspect(capsys, tmp_path)
    assert values["model"]["parameters"] == 8_030_261_248 and values["weights"]["bytes"] == end
    assert 0 < sum(read) < 2**20


@pytest.mark.quick
def test_a_head_beside_a_tied_embedding_is_named(tmp_path, capsys):
    """Which of the two a load uses, only values say."""
    folder = changed(tmp_path, DATA / "llama", tie_word_embeddings=True)
    values, err, _ = inspect(capsys, folder)
    assert values["weights"]["head"] == "lm_head.weight" and values["model"]["is_tied"]
    assert "lm_head.weight is stored beside a tied embedding; a load compares the two" in err


@pytest.mark.quick
def test_the_screen_of_the_documentation(capsys, monkeypatch):
    """Command and output are those of the page, and fit 80 columns."""
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"^```text\n\$ (shardplan checkpoint inspect .*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    command, expected = block
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(None, command.split()[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines] == expected.splitlines()
    assert all(len(line) <= 80 for line in lines)
