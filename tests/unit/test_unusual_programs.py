"""Programs of other shapes than a loop over transformer layers: FLOPs by hand, and nothing unpriced without a word."""

import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import pytest
from conftest import GOLDEN
from rich.console import Console

from shardplan.cost.calibration import calibration_of
from shardplan.cost.sharding import CompilerQuirks
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import abstract_module, build_model
from shardplan.plan.pins import Rules
from shardplan.plan.workload.workload import Workload
from shardplan.program.named_arrays import TracedArray
from shardplan.program.naming.primitives import PRIMITIVES, ROWS
from shardplan.program.step_trace import plan_step, trace_step
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step
from shardplan.report.plan.tables import print_plan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.search.space import Space

B, S, E, M, STATE, RANK, WINDOW, MELS = 2, 64, 32, 48, 4, 8, 4, 10


def trace(function, *arguments):
    """The step of a function of arrays, given as pairs of a shape and its axes; those after the first are weights."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in arguments]
    named = []
    for i, (_, axes) in enumerate(arguments):
        named.append(Argument.parameter(axes, f"weight {i}") if i else Argument(axes))
    return build_step(trace_jaxpr(jax.make_jaxpr(function)(*arrays), named))


def flops(step) -> float:
    """FLOPs of all matmuls of a step."""
    matmuls = (task for task in step.tasks if task.contracted)
    return sum(2 * task.executions * math.prod(size for size, _ in task.matmul_extents) for task in matmuls)


def state_space(x, up, window, project, rate, down):
    """A block of a state-space model: a convolution of every channel, and a scan over positions."""
    hidden = x @ up
    windows = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": M}
    hidden = jax.nn.silu(jax.lax.conv_general_dilated(hidden, window, (1,), [(WINDOW - 1, 0)], **windows))
    step, inputs, outputs = jnp.split(hidden @ project, [RANK, RANK + STATE], -1)
    step = jax.nn.softplus(step @ rate)
    decay = jnp.exp(-step[..., None] * jnp.arange(1.0, STATE + 1))
    added = (step * hidden)[..., None] * inputs[:, :, None]
    _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (decay, added), axis=1)
    return jnp.einsum("bpms,bps->bpm", states, outputs) @ down


STATE_SPACE = (
    ((B, S, E), ("batch", "position", "embed")),
    ((E, M), ("embed", "mlp")),
    ((WINDOW, 1, M), ("window", None, "mlp")),
    ((M, RANK + 2 * STATE), ("mlp", None)),
    ((RANK, M), (None, "mlp")),
    ((M, E), ("mlp", "embed")),
)


def test_a_state_space_model():
    """Its convolution and its scan are elementwise work; that an exchange along positions is not counted is said."""
    by_hand = 2 * B * S * (E * M + M * (RANK + 2 * STATE) + RANK * M + M * STATE + M * E)
    step = trace(state_space, *STATE_SPACE)
    assert flops(step) == by_hand
    assert not step.unpriced and step.approximations.keys() == {
        "convolutions, without the exchange of neighbours along a sharded axis",
        "slices, sorts and scans along batch or positions, of which the exchange along a sharded axis is not counted",
    }
    gradient = jax.grad(lambda *arrays: state_space(*arrays).sum(), tuple(range(len(STATE_SPACE))))
    # the gradients need no output of the last matmul, and that of the states is an outer product
    assert flops(trace(gradient, *STATE_SPACE)) == 3 * by_hand - 2 * B * S * (M * E + M * STATE)


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (1, 2), (2, 1)])
def test_a_convolution_is_a_matmul_of_its_windows(groups, stride):
    """As at the start of a speech model: it sums over its window and the channels of its group."""

    def encode(x, kernel):
        numbers = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": groups}
        return jax.lax.conv_general_dilated(x, kernel, (stride,), [(1, 1)], **numbers)

    arguments = ((B, S, MELS), ("batch", "position", "mels")), ((3, MELS // groups, E), ("window", "mels", "embed"))
    step = trace(encode, *arguments)
    by_hand = 2 * B * (S // stride) * 3 * MELS // groups * E
    (task,) = [task for task in step.tasks if task.contracted]
    assert flops(step) == by_hand and not step.unpriced
    assert task.results[0].axes == (("batch", "position", "embed") if stride == 1 else ("batch", "embed"))
    assert "position" in step.resized_axes and "mels" not in step.resized_axes
    # that of the kernel, and that of x, which multiplies strided windows with zeros in between
    gradient = trace(jax.grad(lambda *arrays: encode(*arrays).sum(), (0, 1)), *arguments)
    assert flops(gradient) == (1 + stride) * by_hand


def test_a_convolution_to_one_channel_is_a_matmul():
    def encode(x, kernel):
        numbers = {"dimension_numbers": ("NWC", "WIO", "NWC")}
        return jax.lax.conv_general_dilated(x, kernel, (1,), [(1, 1)], **numbers)

    step = trace(encode, ((B, S, E), ("batch", "position", "embed")), ((3, E, 1), ("window", "embed", None)))
    assert flops(step) == 2 * B * S * 3 * E


@pytest.mark.slow
@pytest.mark.parametrize("layers", [10, pytest.param(100, marks=pytest.mark.whole)])
def test_unrolled_layers_are_planned_as_a_loop_over_them(make_config, layers):
    config = make_config(model_config="llama-3.1-8b", hardware_slice="v4-16", workload_batch=8, workload_position=1024)
    # of Levanter's class, because the decoder has no layers outside of a loop
    model = build_model({**read_config("llama-3.1-8b", None, LEVANTER), "num_hidden_layers": layers}, 1024)
    unrolled = dataclasses.replace(model.config, scan_layers=False)
    without_loop = dataclasses.replace(model, config=unrolled, template=abstract_module(unrolled, model.vocab))
    workload = config.workload.resolve()
    assert flops(plan_step(without_loop, workload)) == flops(plan_step(model, workload))
    assert not any(operation.body for operation in trace_step(without_loop, workload).operations)
    looped, plan = make_plan(config, model), make_plan(config, without_loop)
    assert plan.memory == looped.memory
    assert plan.cost.step_seconds == pytest.approx(looped.cost.step_seconds, rel=0.01)
    # of mappings that tie, such as those of matrices of one size, the rounding of sums decides
    as_looped = plan_given_mappings(config, without_loop, looped.mesh, looped.compute_mapping, looped.param_mapping)
    assert as_looped.memory == plan.memory
    assert as_looped.cost.step_seconds == pytest.approx(plan.cost.step_seconds, rel=1e-9)


def test_every_primitive_has_one_row():
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names)) == len(PRIMITIVES)


@pytest.mark.slow
def test_a_plan_says_what_is_not_priced(monkeypatch, make_config):
    """Found by the search, or given: both say so, and the text of a dry run shows it."""
    monkeypatch.delitem(PRIMITIVES, "logistic")
    config = make_config(model_ref=GOLDEN / "llama", hardware_slice="v4-8", workload_batch=8, workload_position=60)
    model = model_from_config(config)
    plan = make_plan(config, model)
    given = plan_given_mappings(config, model, plan.mesh, plan.compute_mapping, plan.param_mapping)
    for each in (plan, given):
        [reason] = [reason for reason in each.search.reasons if "is not priced" in reason]
        assert reason.startswith(
            "logistic is not priced: counted as elementwise work, by its bytes, without FLOPs and collectives ("
        )
        out = Console(file=io.StringIO(), width=200)
        print_plan(each, out)
        assert "logistic is not priced" in out.file.getvalue()


def test_an_axis_of_elementwise_work_is_not_stacked():
    """A loop takes one index at a time of the axis along which layers are stacked, and no axis that no matmul has."""

    def layers(x, weights, scales):
        def layer(x, layer):
            weight, scale = layer
            return x + (jnp.tanh(x @ weight)[:, None] * scale).sum(1), None

        return jax.lax.scan(layer, x, (weights, scales))[0]

    shapes = (
        ((B, E), ("batch", "embed")),
        ((3, E, E), ("layer", "embed", "mlp")),
        ((3, RANK, E), ("layer", "rank", "mlp")),
    )
    step = trace(layers, *shapes)
    assert step.stacked_axes == {"layer"}
    assert step.computed_axes == {"batch", "embed", "mlp", "rank"}
    parameters = tuple(
        TracedArray(tuple(((name, size),) for name, size in zip(axes, shape, strict=True)), 4, f"weight {i}")
        for i, (shape, axes) in enumerate(shapes[1:], 1)
    )
    hardware = parse_slice("v4-8")
    factors = calibration_of(step, hardware)
    step = dataclasses.replace(step, parameters=parameters, activation_axes=("batch", "position"))
    space = Space(step, "batch", "position", "embed", hardware, factors, CompilerQuirks(), math.inf, Rules())
    assert space.tensor_axes == ("mlp", "rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind",
    [("llama-3.1-8b", "eval"), ("llama-3.1-8b", "score"), ("llama-3.1-8b", "train"), ("mixtral-8x7b", "train")],
)
def test_unrolled_layers_are_traced_once_to_the_same_operations(monkeypatch, name, kind):
    model = build_model({**read_config(name, None, LEVANTER), "num_hidden_layers": 4}, 1024)
    config = dataclasses.replace(model.config, scan_layers=False)
    unrolled = dataclasses.replace(model, config=config, template=abstract_module(config, model.vocab))
    workload = Workload(kind, 8, 1024, microbatches=2 if kind == "train" else 1)
    calls = []
    block = type(unrolled.template.transformer.layers.blocks[0])
    call = block.__call__

    def counted(self, *args, **kwargs):
        calls.append(self)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(block, "__call__", counted)
    once = build_step(trace_step(unrolled, workload))
    assert len(calls) == 1
    monkeypatch.setattr("shardplan.program.step_trace.trace_equal_blocks_once", lambda module: module)
    inline = build_step(trace_step(unrolled, workload))
    assert len(calls) == 1 + 4
    assert once.tasks == inline.tasks
    assert [frozenset(point) for point in once.points] == [frozenset(point) for point in inline.points]
