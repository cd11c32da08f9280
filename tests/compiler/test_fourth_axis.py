"""A mesh axis is a row: with a throw-away one added, the package plans, asks the compiler, and loads."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import GOLDEN, ROOT
from safetensors.numpy import load_file

import shardplan

pytestmark = pytest.mark.whole
ROW = '    MeshAxis("expert", False, TensorUse.OWN, False, 3, None, "Devices along a throw-away axis."),\n'
PLAN_LOAD_VERIFY = """
import json
import sys

import numpy as np

from shardplan import Plan, load_pretrained
from shardplan.__main__ import main
from shardplan.model.inspect import named_leaves

checkpoint, plan, arrays, verdict, for_cpu, for_tpu = sys.argv[1:]
assert main("plan", [*json.loads(for_cpu), "--json", plan]) == 0
module = load_pretrained(checkpoint, plan=Plan.load(plan))
leaves = {path: leaf.array for path, leaf in named_leaves(module)}
assert any("expert" in str(array.sharding.spec) for array in leaves.values())
np.savez(arrays, **{path: np.asarray(array) for path, array in leaves.items()})
print("VERIFY")
assert main("verify", [*json.loads(for_tpu), "--json", verdict]) == 0
"""


@pytest.fixture(scope="module")
def run_with_row(tmp_path_factory):
    """Run Python on a copy of the package whose table of mesh axes has one row more; returns what it printed."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "shardplan", folder / "shardplan")
    table = folder / "shardplan" / "hardware" / "mesh_axes.py"
    before, end, after = table.read_text().partition('"Number of devices along model."),\n')
    table.write_text(before + end + ROW + after)
    variables = {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def arguments(slice_name):
    return json.dumps([
        "--model.ref", str(GOLDEN / "llama"), "--hardware.slice", slice_name, "--workload.batch=4",
        "--workload.position=128", "--workload.param_dtype=float32", "--mesh.expert=2", "--mesh.model=2",
    ])  # fmt: skip


@pytest.fixture(scope="module")
def planned_and_loaded(run_with_row, tpu_compiler, tmp_path_factory):
    """What one process printed of its plan, and its files of arrays and of verdicts: imports take longest."""
    plan, arrays, verdict = (tmp_path_factory.mktemp("row") / name for name in ("plan.json", "arrays.npz", "v.json"))
    commands = arguments("cpu-8"), arguments("v4-16")
    printed = run_with_row("-c", PLAN_LOAD_VERIFY, GOLDEN / "llama", plan, arrays, verdict, *commands)
    return printed.partition("VERIFY")[0], arrays, verdict


def test_the_compiler_accepts_a_plan_with_a_fourth_axis(planned_and_loaded):
    _, _, verdict = planned_and_loaded
    (judged,) = json.loads(verdict.read_text())["verdicts"]
    assert judged["outcome"] == "fits" and judged["mesh"]["expert"] == 2


def test_a_plan_with_a_fourth_axis_is_loaded(planned_and_loaded):
    """Parameters have the values of the checkpoint, whatever axes shard them; Levanter's section names the axis."""
    printed, arrays, _ = planned_and_loaded
    assert "expert: 2}" in printed and "[model, expert]" in printed
    loaded = np.load(arrays)
    stored = {}
    for file in sorted((GOLDEN / "llama").glob("*.safetensors")):
        stored |= load_file(file)
    np.testing.assert_array_equal(loaded["embedding"], stored["model.embed_tokens.weight"])
    sizes = sum(loaded[path].size for path in loaded.files)
    assert sizes == sum(tensor.size for tensor in stored.values())


def test_a_plan_without_the_axis_has_one_device_along_it(run_with_row):
    path = ROOT / "docs" / "gallery" / "plans" / "405b-evaluation.json"
    printed = run_with_row("-c", f"from shardplan import Plan; print(Plan.load({str(path)!r}).mesh)")
    assert eval(printed) == {**shardplan.Plan.load(str(path)).mesh, "expert": 1}
