"""Two processes export a model of eight devices, and Orbax alone restores it on four, by the lines of its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from multidevice.test_save_orbax import restored
from processes import ROOT, fork_python
from safetensors.numpy import load_file
from test_eval import TIMEOUT, free_port

WORKER = Path(__file__).with_name("orbax_worker.py")
LAYER = "segments.0.stacked.layers.0"
REPORT = """
assert "shardplan" not in sys.modules
leaves = jax.tree_util.tree_leaves_with_path(weights)
arrays = {jax.tree_util.keystr(path, simple=True, separator="."): array for path, array in leaves}
np.savez("restored.npz", **arrays)
print({len(array.sharding.device_set) for array in arrays.values()}, sum(
    not array.sharding.is_fully_replicated for array in arrays.values()
))
"""


def start(*argvs):
    """Exit codes and errors of connected processes, each with its arguments."""
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(len(argvs))}
    processes = [fork_python(argv, JAX_PROCESS_ID=str(number), **together) for number, argv in enumerate(argvs)]
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    return [process.returncode for process in processes], errors


def restore(folder):
    """Run the first snippet of the page in a process of four devices, in a folder with `build/orbax`."""
    page = (ROOT / "docs" / "howto" / "orbax.md").read_text(encoding="utf-8")
    snippet = page.partition("```python\n")[2].partition("```")[0]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    command = [sys.executable, "-c", f"import sys\n{snippet}{REPORT}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout, dict(np.load(Path(folder) / "restored.npz"))


def llama_arrays(source):
    """The arrays that the page lists for a Llama, made of the tensors of a checkpoint by numpy."""
    tensors = {name: value for file in source.glob("*.safetensors") for name, value in load_file(file).items()}
    config = json.loads((source / "config.json").read_text())
    layers, embed, head_size = (config[key] for key in ("num_hidden_layers", "hidden_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def stack(name, *shape):
        stacked = np.stack([tensors[f"model.layers.{i}.{name}.weight"] for i in range(layers)])
        return stacked.reshape(layers, *shape) if shape else stacked

    in_layers = {
        "self_attn.q_proj": stack("self_attn.q_proj", kv_heads, heads // kv_heads, head_size, embed),
        "self_attn.k_proj": stack("self_attn.k_proj", kv_heads, head_size, embed),
        "self_attn.v_proj": stack("self_attn.v_proj", kv_heads, head_size, embed),
        "self_attn.o_proj": stack("self_attn.o_proj", embed, heads, head_size),
        **{f"mlp.{name}_proj": stack(f"mlp.{name}_proj") for name in ("gate", "up", "down")},
        "attention_norm": stack("input_layernorm"),
        "mlp_norm": stack("post_attention_layernorm"),
    }
    return {
        "embedding": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
        **{f"{LAYER}.{name}.weight": array for name, array in in_layers.items()},
    }


def test_eight_devices_to_four(golden, tmp_path):
    """Every array has the bits of the safetensors files; each process has written the shards of its own devices."""
    folder = tmp_path / "build" / "orbax"
    argv = ["-m", "shardplan.checkpoint", "convert", "--hardware.slice", "cpu-8", "--format", "orbax", "--to", folder]
    argv += ["--model", golden / "llama", "--workload.param_dtype", "float32", "--pin", "params.embed=data"]
    argv += ["--mesh.data", "8", "--workload.batch", "8", "--workload.position", "64"]
    codes, errors = start(argv, argv)
    assert codes == [0, 0], errors
    assert f"written to {folder}: orbax, float32" in errors[0] and "written to" not in errors[1]
    expected = llama_arrays(golden / "llama")
    written = [
        sum(file.stat().st_size for file in (folder / "0" / "items" / f"ocdbt.process_{i}" / "d").iterdir())
        for i in range(2)
    ]
    assert max(written) < 0.6 * sum(array.nbytes for array in expected.values())
    output, arrays = restore(tmp_path)
    assert output.split() == ["{4}", str(len(expected))]  # all of them sharded, over all devices
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(arrays[name].view(np.uint32), array.view(np.uint32), err_msg=name)


@pytest.mark.parametrize(
    ("fault", "codes", "message"),
    [
        ("full", [5, 2], "out cannot be written to: [Errno 28] No space left on device"),
        ("killed", [5, -9], "process 1"),
    ],
)
@pytest.mark.whole
def test_the_other_process_ends_when_one_fails(golden, tmp_path, fault, codes, message):
    """It would wait for ever at a barrier of Orbax; what is left does not look like a checkpoint, and is replaced."""
    folder = tmp_path / "out"
    argvs = [[WORKER, golden / "llama", folder, each] for each in ("", fault)]
    actual, errors = start(*argvs)
    assert actual == codes, errors
    assert message in errors[0] and "Traceback" not in errors[0]
    left = {path.name for path in folder.iterdir()}
    assert left == {"config.json", "0.orbax-checkpoint-tmp", "shardplan.incomplete"}
    actual, errors = start(*[[WORKER, golden / "llama", folder, "replicated"]] * 2)
    assert actual == [0, 0], errors
    assert {path.name for path in folder.iterdir()} == {"config.json", "0"}
    arrays, expected = restored(folder / "0" / "items"), llama_arrays(golden / "llama")
    layers = "params.params.transformer.layers.stacked"  # of Levanter's class
    for name in ("mlp.up_proj.weight", "self_attn.q_proj.weight"):
        np.testing.assert_array_equal(arrays[f"{layers}.{name}"], expected[f"{LAYER}.{name}"], err_msg=name)
