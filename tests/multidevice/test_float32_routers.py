"""Routers stay float32 in a model of bfloat16: planned, loaded, computed, trained, checked and written."""

import json
import shutil

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import run
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from shardplan import audit, load_config, load_pretrained, make_plan
from shardplan.checkpoint.saving.save import save_pretrained
from shardplan.errors import ConfigError
from shardplan.execution import step_program
from shardplan.execution.device_mesh import make_mesh
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import DECODER
from shardplan.plan.plan import Plan
from shardplan.program.step_trace import plan_step
from shardplan.search.make_plan import model_from_config

BATCH, POSITION, LAYERS, EXPERTS, EMBED = 8, 32, 2, 4, 96
ROUTER = "segments[0].stacked.layers[0].mlp.router.weight"
GATE = "model.layers.{}.block_sparse_moe.gate.weight"
GATES = {GATE.format(layer) for layer in range(LAYERS)}


def model_and_plan(folder, kind="eval"):
    """The decoder's model of a checkpoint, and its plan in bfloat16 with sharded experts."""
    config = load_config(
        model={"ref": str(folder), "levanter_class": DECODER},
        hardware={"slice": "cpu-8"},
        mesh={"data": 4, "model": 2},
        workload={"kind": kind, "batch": BATCH, "position": POSITION, "param_dtype": "bfloat16"},
        pin=["experts=model", "params.experts=model"],
    )
    model = model_from_config(config)
    return model, make_plan(config, model)


@pytest.fixture(scope="module")
def planned(golden):
    return model_and_plan(golden / "mixtral")


def tensors(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def write_checkpoint(golden, folder, change):
    """Write the golden Mixtral with `change` applied to its tensors, name -> array."""
    folder.mkdir()
    shutil.copy(golden / "mixtral" / "config.json", folder)
    save_file(change(tensors(golden / "mixtral")), folder / "model.safetensors")
    return folder


def check_arrays(module, golden):
    """The router has the stored values in float32, and everything else is bfloat16."""
    arrays = {path: leaf.array for path, leaf in named_leaves(module)}
    stored = tensors(golden / "mixtral")
    gates = np.stack([stored[GATE.format(layer)] for layer in range(LAYERS)])
    np.testing.assert_array_equal(np.asarray(arrays[ROUTER]), gates, strict=True)
    assert {path for path, array in arrays.items() if array.dtype != jnp.bfloat16} == {ROUTER}
    assert len(arrays[ROUTER].sharding.device_set) == 8


def test_loaded_as_planned(golden, planned, tmp_path, raises_message):
    _, plan = planned
    assert {each.path: each.dtype for each in plan.parameters if each.dtype != "bfloat16"} == {ROUTER: "float32"}
    (router,) = (each for each in plan.parameters if each.path == ROUTER)
    assert router.bytes_per_device in {4 * LAYERS * EXPERTS * EMBED // shards for shards in (1, 2, 4, 8)}
    module = load_pretrained(golden / "mixtral", plan=plan)
    check_arrays(module, golden)
    assert str(audit(module, plan)).count("as planned") == len(plan.parameters)
    rounded = eqx.tree_at(lambda m: m.segments[0].stacked.layers[0].mlp.router.weight.array, module, replace_fn=narrow)
    with raises_message(ConfigError):
        audit(rounded, plan)
    plan.save(str(tmp_path / "plan.json"))
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def narrow(array):
    return array.astype(jnp.bfloat16)


def test_loaded_without_a_plan(golden, planned):
    model, _ = planned
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))):
        module = load_pretrained(
            golden / "mixtral", config=model.config, axis_mapping={"experts": "model"}, dtype="bfloat16"
        )
    check_arrays(module, golden)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("bfloat16", f"{ROUTER} has bytes_per_device "),
        ("float16", f"{ROUTER} has dtype float16, workload.param_dtype is bfloat16"),
    ],
)
def test_another_type_contradicts_a_plan(planned, tmp_path, dtype, message):
    values = planned[1].to_json()
    next(each for each in values["parameters"] if each["path"] == ROUTER)["dtype"] = dtype
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as raised:
        Plan.load(str(tmp_path / "plan.json"))
    assert message in str(raised.value)


def losses(folder):
    """The losses of tokens, computed in bfloat16 as planned."""
    model, plan = model_and_plan(folder)
    program = step_program(model, plan, make_mesh(plan))
    rows = np.random.default_rng(0).integers(0, 256, (BATCH, POSITION), dtype=np.int32)
    inputs = [
        hax.NamedArray(jax.device_put(array, each.array.sharding), each.axes)
        for array, each in zip((rows, np.ones_like(rows, bool)), program.arguments[1:], strict=True)
    ]
    return np.asarray(program.compile({})(load_pretrained(folder, plan=plan), *inputs).array)


def test_experts_follow_differences_that_bfloat16_does_not_have(golden, tmp_path):
    """Of four experts whose scores differ by 1 in 4096, the last two are chosen; after rounding it would be the first.

    Tokens have a large first channel, which alone the router reads. In the two models of comparison all scores are
    equal, and the four experts are twice the last two, or twice the first two.
    """

    def change(gates, source_of):
        def of(stored):
            changed = dict(stored)
            changed["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"].copy()
            changed["model.embed_tokens.weight"][:, 0] = 2.0
            for layer in range(LAYERS):
                changed[GATE.format(layer)] = np.pad(gates[:, None], ((0, 0), (0, EMBED - 1))).astype(np.float32)
                for expert, source in enumerate(source_of):
                    for name in ("w1", "w2", "w3"):
                        at = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{name}.weight"
                        changed[at.format(expert)] = stored[at.format(source)]
            return changed

        return of

    near, equal = 1 + np.arange(EXPERTS) / 4096, np.ones(EXPERTS)
    assert len({*near.astype(ml_dtypes.bfloat16)}) == 1
    cases = {"near": (near, (0, 1, 2, 3)), "last two": (equal, (2, 3, 2, 3)), "first two": (equal, (0, 1, 0, 1))}
    results = {}
    for name, case in cases.items():
        results[name] = losses(write_checkpoint(golden, tmp_path / name, change(*case)))
    differences = {name: np.abs(results["near"] - results[name]).max() for name in ("last two", "first two")}
    assert differences["last two"] < 0.05 * differences["first two"]


def test_training_keeps_the_type(golden):
    """The router and its moments are float32: where the step is priced, before an update, and after it."""
    model, plan = model_and_plan(golden / "mixtral", "train")
    program = step_program(model, plan, make_mesh(plan))
    before, after = arrays_of(program.arguments[:2]), arrays_of(program.lower().out_info[:2])
    assert before == after
    wide = [path for path, dtype in before if dtype == jnp.float32]
    assert len(wide) == 3 and all(path.endswith("router.weight") for path in wide)
    step = plan_step(model, plan.workload.resolve())
    priced = [array.itemsize for array in (*step.parameters, *step.state)]
    assert priced == [dtype.itemsize for _, dtype in before]


def arrays_of(tree):
    return [(path, getattr(leaf, "array", leaf).dtype) for path, leaf in named_leaves(tree)]


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_copy_rounds_no_router(golden, tmp_path, stored):
    """It has the requested type, and the router the stored one if that is wider."""

    def cast(given):
        return {name: array.astype(stored) for name, array in given.items()}

    source = write_checkpoint(golden, tmp_path / "source", cast)
    done = run(
        "checkpoint", "convert", f"--model={source}", "--hardware.slice=cpu-8", "--workload.param_dtype=bfloat16",
        f"--workload.batch={BATCH}", f"--workload.position={POSITION}", f"--to={tmp_path / 'out'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_written(tmp_path / "out", tensors(source), stored)


def check_written(folder, source, gate_dtype):
    written = tensors(folder)
    assert written.keys() == source.keys()
    for name, value in written.items():
        expected = source[name].astype(gate_dtype if name in GATES else ml_dtypes.bfloat16)
        np.testing.assert_array_equal(value, expected, err_msg=name, strict=True)


def test_saving_rounds_no_router(golden, planned, tmp_path):
    """Of a model in float32, as after training, that is written in bfloat16."""
    model, _ = planned
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))):
        module = load_pretrained(golden / "mixtral", config=model.config, axis_mapping={"experts": "model"})
    save_pretrained(module, str(tmp_path / "out"), {"model_type": "mixtral"}, dtype="bfloat16")
    check_written(tmp_path / "out", tensors(golden / "mixtral"), np.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
