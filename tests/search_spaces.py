"""Random programs, the spaces of their mappings, and every point of a space for brute force."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

from shardplan.cost.calibration import calibration_of
from shardplan.cost.roofline import step_tasks
from shardplan.cost.sharding import CompilerQuirks
from shardplan.hardware import parse_slice
from shardplan.plan.pins import Rule, Rules
from shardplan.program.named_arrays import TracedArray
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step
from shardplan.search.components.compute_sharding import METHODS
from shardplan.search.space import Space

MAX_POINTS = 500
"""Points of a space that brute force evaluates at most: most spaces have fewer, the others would dominate the time."""


@st.composite
def spaces(draw):
    """A random program, or its gradient, on a few devices: an embedding, layers with MLPs, a head and perhaps experts;
    or an embedding, attention and a head."""
    size = st.sampled_from([2, 3, 4, 6, 8])
    batch, position = draw(st.sampled_from([2, 3, 4, 6])), draw(st.sampled_from([2, 3, 8, 64]))
    e, v, layers = 2 * draw(size), 2 * draw(size), draw(st.integers(1, 3))
    second = draw(st.sampled_from(["mlp", "experts", "attention", "attentions", "none"]))
    # the name of an axis means nothing, also where it looks like that of something else
    widths = {"attention": 2 * draw(size), "position'": 2 * draw(size)} if second == "mlp" else {"m": 2 * draw(size)}
    parameters = {"embed": {"v": v, "e": e}, "head": {"v": v, "e": e}}
    kinds = {"attention": ("k",), "attentions": ("k", "h")}.get(second, ())
    for name in kinds:  # attention of several kinds is in several components, and has one method
        heads = {name: draw(st.sampled_from([1, 2, 3])), f"{name}g": draw(st.sampled_from([1, 2]))}
        projections = {"query": {**heads, None: 64, "e": e}, "key": {name: heads[name], None: 64, "e": e}}
        widths, parameters = {}, parameters | {f"{name}_{path}": axes for path, axes in projections.items()}
    if second == "experts":
        parameters |= {"experts": {"x": 2, "e": e, "w": 2 * draw(size)}}
    for name, width in widths.items():
        parameters |= {f"{name}_up": {"layer": layers, name: width, "e": e}}
        parameters |= {f"{name}_down": {"layer": layers, "e": e, name: width}}

    def attention(x, weights, name):
        q, keys = (
            jnp.einsum(rule, x, weights[f"{name}_{path}"])
            for rule, path in (("bse,kgde->bkgsd", "query"), ("bse,kde->bksd", "key"))
        )
        scores = jax.nn.softmax(jnp.einsum("bkgsd,bktd->bkgst", q, keys))
        out = jnp.einsum("bkgst,bktd->bkgsd", scores, keys)
        return x + jnp.einsum("bkgsd,kgde->bse", out, weights[f"{name}_query"])

    def forward(weights, tokens, rows, sizes):
        def layer(x, weights):
            for name in widths:
                x = x + jnp.tanh(x @ weights[f"{name}_up"].T) @ weights[f"{name}_down"].T
            return x, None

        if kinds:
            x = weights["embed"][tokens]
            for name in kinds:
                x = attention(x, weights, name)
            return (x @ weights["head"].T).max()
        stacked = {path: weights[path] for path in weights if "_" in path}
        x, _ = jax.lax.scan(layer, weights["embed"][tokens], stacked)
        routed = jax.lax.ragged_dot(rows, weights["experts"], sizes).max() if "experts" in weights else 0.0
        return (x @ weights["head"].T).max() + routed

    weights = {path: jax.ShapeDtypeStruct(tuple(axes.values()), jnp.float32) for path, axes in parameters.items()}
    tokens = jax.ShapeDtypeStruct((batch, position), jnp.int32)
    rows, sizes = jax.ShapeDtypeStruct((48, e), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    function = jax.grad(forward) if draw(st.booleans()) else forward
    jaxpr = jax.make_jaxpr(function)(weights, tokens, rows, sizes)
    arguments = [Argument.parameter(tuple(parameters[path]), path) for path in sorted(parameters)]
    arguments += [Argument(("batch", "position")), Argument((None, "e")), Argument((None,))]
    step = dataclasses.replace(
        build_step(trace_jaxpr(jaxpr, arguments)),
        parameters=tuple(
            TracedArray(tuple(((name, n),) for name, n in axes.items()), 4, path)
            for path, axes in sorted(parameters.items())
        ),
        activation_axes=("batch", "position"),
        vocab="v",
    )
    hardware = parse_slice(draw(st.sampled_from(["v4-8", "v6e-4", "cpu-3", "cpu-6", "4xv6e-1"])))
    quirks = CompilerQuirks(draw(st.sampled_from([None, 4])), *(draw(st.booleans()) for _ in range(4)))
    factors = calibration_of(step, hardware)
    space = Space(step, "batch", "position", "e", hardware, factors, quirks, math.inf, Rules(), requires_kernel=False)
    space = dataclasses.replace(space, methods=draw(st.sampled_from([(), METHODS])), allows_idle=draw(st.booleans()))
    return dataclasses.replace(space, rules=draw(rules(space)))


def rules(space):
    """Up to two pins, on different logical axes, and up to two prohibitions."""
    axes = st.tuples(st.sampled_from([*space.sizes]), st.booleans())
    axes = axes.filter(lambda drawn: drawn[0] != "layer" and not (drawn[1] and drawn[0] in ("batch", "position")))
    mesh_axes = st.sampled_from([(), ("data",), ("model",), ("model", "replica"), ("data", "replica")])
    pins = st.lists(st.tuples(axes, mesh_axes), max_size=2, unique_by=lambda pin: pin[0])
    forbidden = st.lists(st.tuples(axes, st.sampled_from([None, ("data",), ("model",)])), max_size=2)
    return st.builds(
        Rules,
        pins.map(lambda drawn: tuple(Rule(*axis, mesh_axes) for axis, mesh_axes in drawn)),
        forbidden.map(lambda drawn: tuple(Rule(*axis, mesh_axes) for axis, mesh_axes in drawn)),
    )


def has_duplicate(axes, mapping) -> bool:
    """Whether two dimensions of one array would be sharded over one mesh axis (JAX: DuplicateSpecError)."""
    used = [mesh_axis for axis in axes for mesh_axis in mapping.get(axis, ())]
    return len(used) != len(set(used))


def all_assignments(space, meshes):
    """Every point of the space."""
    sizes = {"batch": 0, "position": 0} | space.sizes
    tensor = [axis for axis in sizes if axis not in ("batch", "position", "e", "layer")]
    arrays = {a.axes for task in space.step.tasks for a in (*task.operands, *task.results)}
    # attention contracts the key positions of a result whose query positions have the same name: no conflict
    arrays |= {
        (*task.results[0].axes, *(name for name, _ in task.contracted if name not in task.results[0].axes))
        for task in space.step.tasks
    }
    parameters = {a.axes for a in space.step.parameters}
    stored = ["e", *tensor]
    further = [(), ("data",), ("replica",), ("replica", "data")]
    for mesh in meshes:

        def choices(axis, is_stored, options, mesh=mesh):
            return [
                o for o in space.rules.options(axis, is_stored, options)
                if len(set(o)) == len(o) and all(mesh[a] > 1 for a in o)
                and sizes[axis] % math.prod(mesh[a] for a in o) == 0
            ]  # fmt: skip

        tokens = [
            choices("batch", False, [(), ("data",), ("replica",), ("replica", "data")]),
            choices("position", False, [(), ("data",), ("replica",), ("replica", "data"), ("data", "replica")]),
            choices("e", False, [()]),
        ]
        # a token chooses its expert, so that the axis of experts is unsharded in computations
        tensors = [
            choices(axis, False, [()] if axis == "x" else [(), ("model",), ("model", "replica")]) for axis in tensor
        ]
        for mapped in itertools.product(*tokens, *tensors):
            compute = dict(zip(("batch", "position", "e", *tensor), mapped, strict=True))
            if any(has_duplicate(axes, compute) for axes in arrays):
                continue
            used = {mesh_axis for mesh_axes in compute.values() for mesh_axis in mesh_axes}
            if not space.allows_idle and any(size > 1 and axis not in used for axis, size in mesh.items()):
                continue
            # parameters are sharded further only over mesh axes that batch or positions use
            stored_over = [x for x in further if {*compute["batch"], *compute["position"]}.issuperset(x)]
            for axes_of in itertools.product(
                *(choices(a, True, [(*compute[a], *x) for x in stored_over]) for a in stored)
            ):
                params = dict(zip(stored, axes_of, strict=True))
                if any(has_duplicate(axes, params) for axes in parameters):
                    continue
                for method in space.methods_for(mesh, compute["position"]):
                    yield space.assignment(mesh, compute, params, method)


def total_seconds(space, assignment) -> float:
    """The time of a point, evaluated by itself."""
    return sum(s.total for _, _, s in step_tasks(space.step, assignment, space.hardware, space.calibration))
