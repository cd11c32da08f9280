"""The search against brute force on random programs, and the order of what it finds."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from search_spaces import MAX_POINTS, all_assignments, spaces, total_seconds

from shardplan.cost.calibration import calibration_of
from shardplan.cost.memory import estimate_memory, host_bytes
from shardplan.cost.sharding import CompilerQuirks
from shardplan.hardware import parse_slice
from shardplan.plan.pins import Rules
from shardplan.program.live_buffers import BufferRole
from shardplan.program.named_arrays import TracedArray
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step
from shardplan.search.branch_and_bound import find_smallest, search_meshes
from shardplan.search.make_plan import model_from_config
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.reasons import SearchStatistics
from shardplan.search.search_configuration import search_configuration
from shardplan.search.space import Space, mesh_shapes
from shardplan.search.subproblem.mesh_subproblem import MeshSubproblem, enumerate_subproblems
from shardplan.search.tolerances import TIME_RESOLUTION


@pytest.mark.slow
@settings(max_examples=30)
@given(spaces(), st.floats(0, 1), st.integers(1, 3))
def test_search_equals_brute_force(space, tightness, keep):
    """The search returns the smallest point that ties with the fastest one that fits, for every amount of memory."""
    meshes = mesh_shapes(space.hardware, {})
    assignments = list(itertools.islice(all_assignments(space, meshes), MAX_POINTS + 1))
    assume(0 < len(assignments) <= MAX_POINTS)
    peaks = [estimate_memory(space.step, each).peak for each in assignments]
    available = sorted(peaks)[round(tightness * (len(peaks) - 1))]
    fitting = ((each, peak) for each, peak in zip(assignments, peaks, strict=True) if peak <= available)
    points = [(total_seconds(space, each), peak) for each, peak in fitting]
    ranking = Ranking(keep)
    search_meshes(dataclasses.replace(space, available_bytes=available), meshes, ranking, SearchStatistics())
    best = ranking.candidates[0]
    fastest = min(seconds for seconds, _ in points)
    assert best.seconds <= fastest * (1 + TIME_RESOLUTION) * (1 + 1e-9)
    smallest = min(peak for seconds, peak in points if seconds <= fastest * (1 + TIME_RESOLUTION) * (1 - 1e-9))
    assert best.peak_bytes <= smallest * (1 + 1e-9)
    assert best.seconds == pytest.approx(total_seconds(space, best.assignment))
    assert best.peak_bytes == pytest.approx(estimate_memory(space.step, best.assignment).peak)


@pytest.mark.slow
@settings(max_examples=30)
@given(spaces())
def test_meshes_share_equal_costs_alone(space):
    """Bounds and sizes are those of a mesh by itself, though most of them come from another mesh of the space."""
    for shared in enumerate_subproblems(space, mesh_shapes(space.hardware, {}), SearchStatistics()):
        own_space = dataclasses.replace(space)
        own = MeshSubproblem(own_space, shared.mesh, shared.token_mapping, shared.methods, SearchStatistics())
        assert own.compute_shardings == shared.compute_shardings
        if not all(own.compute_shardings):
            continue  # every mapping has a mesh axis twice
        for table, expected in zip(shared.compute_tables, own.compute_tables, strict=True):
            assert all((part == of_own).all() for part, of_own in zip(table, expected, strict=True))


def moved_to_host(step, arrays):
    """The step with activations in the memory of the host."""

    def moved(buffer):
        is_moved = buffer.role == BufferRole.LIVE and buffer.array in arrays
        return (
            dataclasses.replace(buffer, array=dataclasses.replace(buffer.array, is_on_host=True))
            if is_moved
            else buffer
        )

    points = tuple(tuple((moved(buffer), count) for buffer, count in point) for point in step.points)
    return dataclasses.replace(step, points=points)


@pytest.mark.slow
@settings(max_examples=30)
@given(spaces(), st.data(), st.floats(0, 1), st.floats(0, 1))
def test_the_memory_of_hosts_is_a_limit_as_well(space, data, tightness, host_tightness):
    """The search finds the fastest point that fits in both memories, and none where brute force finds none."""
    live = {b.array: None for point in space.step.points for b, _ in point if b.role == BufferRole.LIVE}
    arrays = data.draw(st.lists(st.sampled_from([*live]), min_size=1, max_size=3))
    space = dataclasses.replace(space, step=moved_to_host(space.step, arrays))
    meshes = mesh_shapes(space.hardware, {})
    assignments = list(itertools.islice(all_assignments(space, meshes), MAX_POINTS + 1))
    assume(0 < len(assignments) <= MAX_POINTS)
    sizes = [(estimate_memory(space.step, each).peak, host_bytes(space.step, each)) for each in assignments]
    limits = [
        sorted(of_memory)[round(part * (len(sizes) - 1))]
        for of_memory, part in zip(zip(*sizes, strict=True), (tightness, host_tightness), strict=True)
    ]
    fitting = [
        each
        for each, (peak, on_host) in zip(assignments, sizes, strict=True)
        if peak <= limits[0] and on_host <= limits[1]
    ]
    ranking = Ranking(1)
    limited = dataclasses.replace(space, available_bytes=limits[0], host_available_bytes=limits[1])
    search_meshes(limited, meshes, ranking, SearchStatistics())
    assert bool(ranking.candidates) is bool(fitting)
    for best in ranking.candidates:
        fastest = min(total_seconds(space, each) for each in fitting)
        assert best.seconds <= fastest * (1 + TIME_RESOLUTION) * (1 + 1e-9)
        assert host_bytes(space.step, best.assignment) <= limits[1] * (1 + 1e-9)
        assert best.peak_bytes == pytest.approx(estimate_memory(space.step, best.assignment).peak)


@pytest.mark.slow
@pytest.mark.parametrize("pin", [(), ("mlp=data",), ("heads=replica", "mlp=model+data")], ids=str)
def test_subproblems_take_no_less_than_their_bounds(make_config, pin):
    """The bounds by which the search skips subproblems hold for matmuls that fill the matrix unit, and with pins."""
    config = make_config(model_config="llama-3.1-70b", hardware_slice="v5p-64", workload_batch=8)
    config = dataclasses.replace(config, pin=pin)
    space = search_configuration(config, model_from_config(config), 1).ranked[0].candidate.space
    reached = 0
    for subproblem in enumerate_subproblems(space, mesh_shapes(space.hardware, {}), SearchStatistics()):
        ranking = Ranking(1)
        subproblem.rank(ranking)
        for candidate in ranking.candidates:
            reached += 1
            assert subproblem.quick_lower_bound <= subproblem.lower_bound <= candidate.seconds * (1 + 1e-9)
    assert reached > 5


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v4-128", "v5e-64"])
def test_candidates_cost_what_the_search_says(make_config, slice_name):
    """Also where the search maps the experts' axes after attention, and chooses a method of attention."""
    config = make_config(model_config="mixtral-8x7b", hardware_slice=slice_name, workload_batch=16)
    config = dataclasses.replace(config, pin=("position=replica",))
    for ranked in search_configuration(config, model_from_config(config), 3).ranked:
        candidate = ranked.candidate
        assert candidate.methods is not None
        assert candidate.seconds == pytest.approx(total_seconds(candidate.space, candidate.assignment))
        assert candidate.peak_bytes == pytest.approx(estimate_memory(candidate.space.step, candidate.assignment).peak)


def test_the_size_of_an_axis_is_that_of_its_parameter():
    """Not that of the part which a reshape leaves: 16 channels of mlp, in 4 groups of 4, can be sharded over 8."""
    arguments = [Argument(("batch", "embed")), Argument.parameter(("embed", "mlp"), "up")]
    arrays = [jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)]

    def grouped(x, up):
        hidden = jnp.tanh(x @ up).reshape(8, 4, 4)
        return jnp.einsum("bgc,bgd->bcd", hidden, hidden)

    step = build_step(trace_jaxpr(jax.make_jaxpr(grouped)(*arrays), arguments))
    step = dataclasses.replace(step, parameters=(TracedArray(((("embed", 32),), (("mlp", 16),)), 4, "up"),))
    hardware = parse_slice("v4-16")
    factors = calibration_of(step, hardware)
    space = Space(step, "batch", "position", "embed", hardware, factors, CompilerQuirks(), math.inf, Rules())
    assert space.sizes["mlp"] == 16 and space.sizes["batch"] == 8
    another = TracedArray(
        ((("embed", 32),), (("mlp", 24),)), 4, "shared"
    )  # is sharded alike, so 16 devices are too many
    space = dataclasses.replace(space, step=dataclasses.replace(step, parameters=(*step.parameters, another)))
    assert space.sizes["mlp"] == 8


def test_a_chain_of_nearly_equal_candidates_does_not_drift():
    """Each candidate ties with the one before, but the last does not tie with the first."""
    space, points = SimpleNamespace(logit_blocks=1, copy_windows=()), ((1.0, 50.0), (1.00099, 40.0), (1.00195, 30.0))
    candidates = [Candidate(space, {}, {}, {}, None, *point) for point in points]
    for order in itertools.permutations(candidates):
        ranking = Ranking(2)
        for candidate in order:
            ranking.add([candidate])
        assert [c.peak_bytes for c in ranking.candidates] == [40, 50]


def test_logits_in_blocks_win_by_more_than_their_loop_takes():
    """The estimate leaves out what the loop over blocks takes; a plan in blocks has to be faster by more than that."""
    at_once, blocks, faster = (
        Candidate(SimpleNamespace(logit_blocks=number, copy_windows=()), {}, {}, {}, None, seconds, peak)
        for number, seconds, peak in ((1, 1.0, 50.0), (8, 0.995, 20.0), (8, 0.98, 30.0))
    )
    for order in itertools.permutations((at_once, blocks, faster)):
        ranking = Ranking(1)
        for i, candidate in enumerate(order):
            ranking.add([candidate])
            added = order[: i + 1]
            expected = faster if faster in added else at_once if at_once in added else blocks
            assert ranking.candidates == [expected]


@pytest.mark.slow
@settings(max_examples=10)
@given(spaces())
def test_where_nothing_fits_the_smallest_is_named(space):
    meshes = mesh_shapes(space.hardware, {})
    peaks = [estimate_memory(space.step, assignment).peak for assignment in all_assignments(space, meshes)]
    ranking = Ranking(2)
    search_meshes(dataclasses.replace(space, available_bytes=0), meshes, ranking, SearchStatistics())
    assert not ranking.candidates
    smallest = find_smallest(space, meshes, math.inf, SearchStatistics())
    assert (smallest and smallest.peak_bytes) == (pytest.approx(min(peaks)) if peaks else None)
    assert smallest is None or find_smallest(space, meshes, smallest.peak_bytes, SearchStatistics()) is None
