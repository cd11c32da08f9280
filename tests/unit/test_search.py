"""The search against brute force, and its arithmetic against hand calculations."""

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import parse_slice
from shardplan.model import Contraction, ModelAxes, Parameter
from shardplan.plan.cost import compute_seconds, compute_traffic, step_seconds, weight_traffic
from shardplan.plan.mapping import independent_sets, mesh_axes_of, shard_count
from shardplan.plan.memory import Workload, activation_bytes, gathered_bytes, logit_bytes
from shardplan.plan.plan import Plan
from shardplan.plan.planner import make_plan
from shardplan.plan.search import mesh_shapes, search

CONFIGS = Path(__file__).parents[2] / "configs"


@given(st.lists(st.sets(st.sampled_from("abcdef"), max_size=4), max_size=6))
def test_independent_sets_equal_brute_force(arrays):
    expected = {
        frozenset(chosen)
        for size in range(7)
        for chosen in itertools.combinations("abcdef", size)
        if all(len(set(chosen) & array) <= 1 for array in arrays)
    }
    found = independent_sets("abcdef", arrays)
    assert len(found) == len(set(found)) and set(found) == expected


def duplicate(axes, mapping) -> bool:
    """Whether two dimensions of one array would be cut along one mesh axis (JAX: DuplicateSpecError)."""
    used = mesh_axes_of(axes, mapping)
    return len(used) != len(set(used))


@st.composite
def models(draw):
    """An embedding, one or two MLPs of random sizes, a head: axes e (residual), m, n, v."""
    size = st.sampled_from([2, 3, 4, 6, 8, 12, 16])
    e, v = 4 * draw(size), 8 * draw(size)
    widths = {"m": 4 * draw(size), "n": 4 * draw(size)} if draw(st.booleans()) else {"m": 4 * draw(size)}
    layers = draw(st.integers(1, 3))
    parameters = [Parameter("embed.weight", {"v": v, "e": e}, "float32")]
    contractions = [Contraction("embed.weight", ("v",), ("e",), is_lookup=True)]
    for name, width in widths.items():
        up, down = f"mlp.{name}_up.weight", f"mlp.{name}_down.weight"
        parameters += [
            Parameter(up, {"layer": layers, name: width, "e": e}, "float32"),
            Parameter(down, {"layer": layers, "e": e, name: width}, "float32"),
        ]
        contractions += [
            Contraction(up, ("e",), (name,), repeats=layers),
            Contraction(down, (name,), ("e",), repeats=layers),
        ]
    parameters.append(Parameter("head.weight", {"v": v, "e": e}, "float32"))
    contractions.append(Contraction("head.weight", ("e",), ("v",)))
    return ModelAxes("random", tuple(parameters), tuple(contractions), (), "e", "position", "v")


def brute_force(model: ModelAxes, workload: Workload, hardware, meshes) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of every mapping of the space, evaluated one by one from the definitions."""
    weights = {p.path: p for p in model.parameters}
    names = [axis for axis in model.axes if axis != "layer"]
    results = []
    for mesh in meshes:
        batch_axes = tuple(axis for axis in ("replica", "data") if mesh[axis] > 1)
        if workload.batch % (mesh["replica"] * mesh["data"]):
            continue
        extras = {
            tuple(a for a in chosen if mesh[a] > 1) for chosen in [(), ("data",), ("replica",), ("data", "replica")]
        }
        for size in range(len(names) + 1):
            for on_model in itertools.combinations(names, size):
                if (mesh["model"] == 1 and on_model) or "e" in on_model:
                    continue
                tensor = {axis: ("model",) for axis in on_model}
                for extra in extras:
                    for count in range(len(names) + 1):
                        for resting in itertools.combinations(names, count):
                            if bool(extra) != bool(resting):
                                continue
                            params = {
                                axis: (*tensor.get(axis, ()), *(extra if axis in resting else ())) for axis in names
                            }
                            if any(
                                duplicate(p.axes, params)
                                or any(p.axes[a] % shard_count((a,), params, mesh) for a in p.axes)
                                for p in model.parameters
                            ):
                                continue
                            compute = {"batch": batch_axes, **tensor}
                            traffic = [
                                t
                                for c in model.contractions
                                for t in weight_traffic(c, weights[c.weight], workload, params, compute, mesh)
                            ]
                            seconds = step_seconds(
                                compute_seconds(model, workload, compute, mesh, hardware),
                                sum(t.seconds(hardware, mesh) for t in traffic),
                                sum(t.seconds(hardware, mesh) for t in compute_traffic(model, workload, compute, mesh)),
                            )
                            gathered = sorted(
                                gathered_bytes(c, weights[c.weight], workload, params, compute, mesh)
                                for c in model.contractions
                            )
                            stored = sum(
                                p.size // shard_count(p.axes, params, mesh) * workload.param_bytes
                                for p in model.parameters
                            )
                            working = max(
                                activation_bytes(model, workload, compute, mesh, attention_scores=False),
                                logit_bytes(model, workload, compute, mesh),
                            )
                            results.append((seconds, stored + sum(gathered[-2:]) + working))
    return results


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(["v4-8", "v4-16", "v5e-4", "v6e-8"]), st.sampled_from([4, 8, 24]), st.integers(1, 200))
def test_search_equals_brute_force(model, slice_name, batch, position):
    hardware = parse_slice(slice_name)
    workload = Workload("batch", batch, position, "float32", "float32")
    meshes = mesh_shapes(hardware, {})
    expected = brute_force(model, workload, hardware, meshes)
    assume(expected)
    best = search(model, workload, hardware, meshes).best
    assert best is not None
    fastest = min(seconds for seconds, _ in expected)
    smallest = min(peak for seconds, peak in expected if seconds <= fastest * 1.05)
    assert best.peak_bytes == smallest
    assert best.seconds <= fastest * 1.05


def plan_of(make_config, name, slice_name, batch=16, **overrides):
    return make_plan(
        make_config(
            model_config=CONFIGS / "models" / f"{name}.json",
            hardware_slice=slice_name,
            workload_batch=batch,
            workload_position=4096,
            **overrides,
        )
    )


def test_405b_on_v4_256(make_config):
    plan = plan_of(make_config, "llama-3.1-405b", "v4-256")
    assert math.prod(plan.mesh.values()) == 128
    assert plan.model.parameters == 405_853_388_800
    for parameter in plan.parameters:
        whole = 2 * math.prod(parameter.axes.values())
        if whole > 2**24:  # everything but the norms
            assert parameter.bytes_per_device == whole // 128, parameter.path
    assert plan.memory.peak < plan.memory.available
    # 405.85e9 x 2 bytes / 128, and the norms' 253 vectors of 16384
    assert plan.memory.parameters == pytest.approx(2 * 405_853_388_800 / 128, rel=1e-3)
    # two FLOPs a weight and token (the embedding is a lookup), and causal attention
    tokens, layers, width = 16 * 4096, 126, 16384
    flops = 2 * tokens * (405_853_388_800 - 128256 * width - 253 * width) + 2 * tokens * 4096 * width * layers
    assert plan.cost.compute_seconds == pytest.approx(flops / 128 / 2.75e14, rel=1e-6)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("slice_name", ["v4-64", "v5p-32", "v6e-16", "tpu7x-16"])
def test_no_duplicates_and_everything_divides(make_config, name, slice_name):
    plan = plan_of(make_config, name, slice_name)
    for mapping in (plan.compute_mapping, plan.param_mapping):
        for parameter in plan.parameters:
            assert not duplicate(parameter.axes, mapping)
            for axis, size in parameter.axes.items():
                assert size % math.prod(plan.mesh[a] for a in mapping.get(axis, ())) == 0
    for parameter in plan.parameters:
        cut = math.prod(plan.mesh[a] for a in mesh_axes_of(parameter.axes, plan.param_mapping))
        assert parameter.bytes_per_device * cut == 2 * math.prod(parameter.axes.values())


def test_memory_parts_add_up_and_the_plan_round_trips(make_config):
    plan = plan_of(make_config, "llama-3.1-8b", "v5e-8", batch=8, workload_param_dtype="float32")
    memory = plan.memory
    assert memory.cast_parameters == memory.parameters // 2
    assert memory.peak == (
        memory.parameters + memory.cast_parameters + memory.gathered_weights + max(memory.activations, memory.logits)
    )
    assert Plan.from_json(plan.to_json()) == plan
    exposed = [c for c in plan.cost.collectives if not c.cause.startswith("weights of")]
    hidden = [c for c in plan.cost.collectives if c.cause.startswith("weights of")]
    assert plan.cost.step_seconds == pytest.approx(
        max(plan.cost.compute_seconds, sum(c.seconds for c in hidden)) + sum(c.seconds for c in exposed)
    )


def test_pinned_mesh_is_kept(make_config):
    plan = plan_of(make_config, "llama-3.1-8b", "v4-64", mesh_model=2, mesh_replica=4)
    assert plan.mesh == {"replica": 4, "data": 4, "model": 2}


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"mesh_model": 3}, ConfigError, "mesh.model 3 does not divide the 32 devices of v4-64"),
        ({"mesh_data": 16, "mesh_model": 16}, ConfigError, "mesh.data 16 x mesh.model 16 does not divide the 32"),
        (
            {"mesh_replica": 1, "mesh_data": 2, "mesh_model": 2},
            ConfigError,
            "mesh.replica 1 x mesh.data 2 x mesh.model 2 is not all of the 32 devices of v4-64; replica x data",
        ),
        (
            {"mesh_data": 32, "batch": 12},
            ConfigError,
            "workload.batch 12 is divisible by no replica x data of the mesh (32); the nearest batch that is: 32",
        ),
        ({"workload_position": 200000}, ConfigError, "workload.position is 200000; the model has 131072 positions"),
    ],
)  # fmt: skip
def test_unusable_configurations(make_config, overrides, error, message):
    overrides = {"batch": 16, **overrides}
    with pytest.raises(error) as raised:
        make_plan(
            make_config(
                **{
                    "model_config": CONFIGS / "models" / "llama-3.1-8b.json",
                    "hardware_slice": "v4-64",
                    "workload_batch": overrides.pop("batch"),
                    "workload_position": 4096,
                    **overrides,
                }
            )
        )
    assert message in str(raised.value)


def test_infeasible_says_how_much_is_lacking(make_config):
    with pytest.raises(InfeasibleError) as raised:
        plan_of(make_config, "llama-3.1-405b", "v4-32")
    message = str(raised.value)
    assert message.startswith("no plan fits v4-32: the nearest miss, mesh (replica ")
    needs = 2 * 405_853_388_800 / 16 / 2**30
    lacking = float(message.split(" GiB are lacking")[0].split(" ")[-1])
    assert needs - 30.75 < lacking < 1.2 * needs - 30.75
