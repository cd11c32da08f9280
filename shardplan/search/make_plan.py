"""make_plan: from a model, a workload and a slice to a Plan."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from importlib import metadata

from shardplan.config import KEYS, Config, HardwareConfig, MeshConfig, WorkloadConfig
from shardplan.cost.attention import kernel_of
from shardplan.cost.calibration import calibration, quirks, usable_bytes
from shardplan.cost.gspmd import GATHER
from shardplan.cost.memory import memory
from shardplan.cost.roofline import step_tasks, transfer_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError, InfeasibleError, nearest
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.model import Model, ModelAxes, build_model, inspect_model, read_config
from shardplan.plan.compiler_options import PLANNED, PLANNED_FOR_EXPERTS
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, as_tuples, mapping_text, mesh_text
from shardplan.plan.plan import (
    BATCH_AXIS,
    UNCUT,
    AttentionPlan,
    Collective,
    CostPlan,
    HardwareInfo,
    Mapping,
    MemoryPlan,
    ModelInfo,
    ParameterPlan,
    Plan,
    RunnerUp,
    SearchInfo,
    WorkloadInfo,
)
from shardplan.plan.workload import workload_of
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step
from shardplan.search.open_choices import Found, Result, find
from shardplan.search.ranking import TIME_RESOLUTION, Candidate
from shardplan.search.space import METHOD
from shardplan.storage import open_folder

KERNEL = " (a kernel can do attention)"
OFFLOAD, NO_PRICE = "offload", "copies of activations to the host and back have no price: its time is too short"
LEFT_OPEN = (None, "auto")
"""Values of keys that leave the choice to the planner."""
NO_KERNEL = (
    "attention can have no kernel here: its time is a guess, for it runs a loop whose length the compiler does not say"
)


def make_plan(
    config: Config, model: Model | None = None, nearest_miss: bool = False, own_attention: bool = False
) -> Plan:
    """The fastest mesh and mappings that fit.

    Args:
        config: model, hardware, mesh and workload; see `shardplan.config`.
        model: the model, where it has been built already.
        nearest_miss: where nothing fits, plan what needs least memory rather than raise.
        own_attention: attention is Levanter's own, which has no kernel where positions are cut.

    Raises:
        ConfigError: an unusable configuration.
        InfeasibleError: nothing fits; says how much memory is lacking at least.
    """
    return rank_plans(config, 1, model, nearest_miss, own_attention)[0]


def rank_plans(
    config: Config,
    count: int,
    model: Model | None = None,
    nearest_miss: bool = False,
    own_attention: bool = False,
) -> list[Plan]:
    """The `count` fastest plans that fit, the fastest first; see `make_plan`.

    No two have mesh, batch, positions and residual axis alike, and what the workload leaves open. Fewer, where there
    are not so many.
    """
    model = model or model_of(config)
    result = find(config, model, count + 1, own_attention)
    if not result.fits and not nearest_miss:
        miss = result.ranked[0]
        raise _failure(miss)
    plans = []
    for found, runner_up in zip(result.ranked, [*result.ranked[1:], None], strict=True):
        space, layout = found.candidate.space, found.candidate.layout
        cost = _cost(space.step, layout, space.hardware)
        info = _search_info(result, found, runner_up, cost)
        info.reasons.extend([NO_KERNEL] if not space.kernels and not space.hardware.is_cpu else [])
        info.reasons.extend([NO_PRICE] if found.config.workload.gradient_checkpointing == OFFLOAD else [])
        info.reasons.extend(_other_attention(found.candidate))
        info.reasons.extend(_unnamed(space.step))
        plans.append(_describe(found.config, inspect_model(model), space.hardware, space.step, layout, cost, info))
    return plans[:count]


def plan_layout(
    config: Config,
    model: Model,
    mesh: MeshShape,
    compute: Mapping,
    params: Mapping,
    attention: AttentionPlan | None = None,
) -> Plan:
    """The Plan of a mesh and mappings that somebody else chose: nothing is searched, nothing refused.

    Attention is Levanter's own, unless `attention` says how else it is done.
    Logical axes that the model does not have are named in `search.reasons`: they cut nothing.
    """
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    step = plan_step(model, workload_of(config.workload))
    layout = ShardingAssignment(
        mesh, as_tuples(compute), as_tuples(params), step.merged, step.activation_axes, quirks(hardware),
        attention or AttentionPlan(), step.pattern,
    )  # fmt: skip
    known = {*axes.axes, axes.position, BATCH_AXIS}
    reasons = ["given, not searched for"] + [
        f"the model has no axis {axis!r}, so that mapping it does nothing; {nearest(axis, known)}"
        for axis in sorted({*compute, *params} - known)
    ]
    given = SearchInfo(1, False, 0.0, None, {}, [*reasons, *_unnamed(step)], given=True)
    return _describe(config, axes, hardware, step, layout, _cost(step, layout, hardware), given)


def with_plan(config: Config) -> tuple[Config, Plan | None]:
    """The Plan that the configuration names, and the configuration with its model, slice, mesh and workload.

    Raises:
        ConfigError: the file cannot be read or is not a plan, or the configuration asks for something else.
    """
    if config.plan is None:
        return config, None
    for name in ("pin", "forbid"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for planning, and plan {config.plan} is given; leave one of the two out")
    plan = Plan.load(config.plan)
    planned = {
        **{f"workload.{key}": value for key, value in vars(plan.workload).items()},
        **{f"mesh.{key}": value for key, value in plan.mesh.items()},
        "hardware.slice": plan.hardware.slice,
    }
    for name, value in planned.items():
        section, _, key = name.partition(".")
        asked = getattr(getattr(config, section), key)
        is_asked = asked not in LEFT_OPEN and (name in config.given or asked != KEYS[name].default)
        if is_asked and asked != value:
            raise ConfigError(f"{name} is {asked}, plan {config.plan} has {value}; leave it out, or plan again")
    return (
        replace(
            config,
            model=replace(
                config.model, ref=config.model.ref or plan.model.ref, config=config.model.config or plan.model.config
            ),
            hardware=HardwareConfig(plan.hardware.slice),
            mesh=MeshConfig(**plan.mesh),
            workload=WorkloadConfig(**vars(plan.workload)),
        ),
        plan,
    )


def check_model(plan: Plan, model: Model) -> None:
    """See that `plan` is for `model`.

    Raises:
        ConfigError: it is for a model with other axes.
    """
    axes = inspect_model(model).axes
    differing = [axis for axis in {**plan.model.axes, **axes} if plan.model.axes.get(axis) != axes.get(axis)]
    if differing:
        axis = differing[0]
        raise ConfigError(
            f"the plan is for {plan.model.name} with {axis} {plan.model.axes.get(axis)}, the model has "
            f"{axes.get(axis)}; plan again"
        )


def model_of(config: Config) -> Model:
    """The model that the configuration names, without weights."""
    folder = open_folder(config.model.ref) if config.model.config is None else None
    return build_model(read_config(config.model.config, folder), config.workload.position)


def _failure(found: Found) -> InfeasibleError:
    miss, hardware = found.candidate, found.candidate.space.hardware
    usable, available = usable_bytes(hardware) / GIB, hardware.generation.hbm_gib
    needed = miss.peak_bytes / GIB
    more = ", more workload.microbatches" if found.config.workload.kind == "train" else ""
    return InfeasibleError(
        f"no plan fits {hardware.name}: the nearest miss, mesh {mesh_text(miss.mesh)}, needs "
        f"{needed:.2f} GiB per device of {available:.2f}, less {available - usable:.2f} for the error of the estimate: "
        f"{needed - usable:.2f} GiB are lacking; use a larger slice, a smaller workload.batch or workload.position"
        f"{more}, or a narrower dtype"
    )


def _describe(
    config: Config,
    axes: ModelAxes,
    hardware: Slice,
    step: Step,
    layout: ShardingAssignment,
    cost: CostPlan,
    found: SearchInfo,
) -> Plan:
    params, work = layout.params, workload_of(config.workload)
    sizes = [round(layout.bytes(array)) for array in step.parameters]
    options = PLANNED_FOR_EXPERTS if work.is_training and step.routed else PLANNED
    return Plan(
        model=ModelInfo(config.model.ref, axes.type, dict(axes.axes), axes.size, config.model.config),
        workload=WorkloadInfo(**{key: value for key, value in vars(work).items() if key != "batch_axis"}),
        hardware=HardwareInfo(hardware.name, hardware.devices, hardware.generation.hbm_gib),
        mesh=dict(layout.mesh),
        compute_mapping=_lists(layout.compute),
        param_mapping=_lists(params),
        parameters=[
            ParameterPlan(
                p.path,
                p.axes,
                work.param_dtype,
                [list(params[axis]) if axis in params else None for axis in p.axes],
                size,
            )
            for p, size in zip(axes.parameters, sizes, strict=True)
        ],
        memory=_memory(step, layout, hardware),
        cost=cost,
        search=found,
        attention=replace(layout.attention, kernel=kernel_of(step.tasks, layout)),
        compiler_options={} if hardware.is_cpu else dict(options),
        versions=_versions(),
    )


def _memory(step: Step, layout: ShardingAssignment, hardware: Slice) -> MemoryPlan:
    found, available = memory(step, layout), int(hardware.generation.hbm_gib * GIB)
    return MemoryPlan(
        **{part: round(size) for part, size in vars(found).items()},
        load_transient=0,  # shards are filled on the host and put on the device once
        peak=round(found.peak),
        available=available,
        reserved=available - int(usable_bytes(hardware)),
    )


def _cost(step: Step, layout: ShardingAssignment, hardware: Slice) -> CostPlan:
    """Time of a step, and its collectives by cause."""
    total = compute = 0.0
    moved: dict[tuple[str, MeshAxes, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for _, mine, seconds in step_tasks(step, layout, hardware, calibration(hardware.generation.name)):
        total += seconds.total
        compute += seconds.compute
        for traffic in mine.traffic:
            sums = moved[traffic.kind, traffic.mesh_axes, traffic.cause]
            sums[0] += traffic.bytes
            sums[1] += traffic.count
            sums[2] += transfer_seconds(traffic, hardware, layout.mesh)
    collectives = [
        Collective(kind, list(mesh_axes), round(size), round(count), seconds, cause)
        for (kind, mesh_axes, cause), (size, count, seconds) in moved.items()
    ]
    return CostPlan(total, compute, sorted(collectives, key=lambda collective: -collective.bytes))


def _search_info(result: Result, found: Found, second: Found | None, cost: CostPlan) -> SearchInfo:
    best = found.candidate
    gathers = sum(c.seconds for c in cost.collectives if c.cause.startswith(GATHER))
    others = sum(c.seconds for c in cost.collectives) - gathers
    chosen = (
        f"the fastest of the search space{KERNEL if found.candidate.space.kernels else ''}, and of what is as fast to "
        f"{TIME_RESOLUTION:.1%} the smallest"
        if result.fits
        else "nothing fits: of the search space what needs least memory"
    )
    reasons = [
        f"{chosen}; {result.statistics.evaluated} choices were weighed",
        f"{best.seconds:.3g} s a step: compute {cost.compute_seconds:.3g} s, other collectives {others:.3g} s, gathers "
        f"of weights {gathers:.3g} s ({max(0.0, cost.step_seconds - cost.compute_seconds - others):.3g} s not hidden "
        "behind compute)",
    ]
    runner_up = None
    if second is not None:
        other = second.candidate
        step, others_step = (workload_of(each.config.workload).training for each in (found, second))
        reasons.append(
            f"runner-up: mesh {mesh_text(other.mesh)}, {mapping_text(other.layout.compute)}; at rest "
            + "; ".join([mapping_text(other.params), *([others_step] if others_step != step else [])])
            + f": {other.seconds / best.seconds - 1:+.1%} time, {(other.peak_bytes - best.peak_bytes) / GIB:+.2f} GiB"
        )
        runner_up = RunnerUp(other.mesh, other.seconds)
    return SearchInfo(
        candidates=result.statistics.evaluated,
        proven_optimal=result.fits,  # what was left out is bounded by something better
        seconds=result.seconds,
        runner_up=runner_up,
        rejected=dict(result.statistics.rejected),
        reasons=reasons + sorted(result.statistics.indivisible.values()),
    )


def _other_attention(found: Candidate) -> list[str]:
    """What attention done in other ways would change."""
    space, mine = found.space, found.layout
    position = mine.compute.get(space.position, ())
    others = [method for method in space.methods_for(found.mesh, position) if method != found.compute.get(METHOD)]
    if mine.attention.strategy == UNCUT or not others:
        return []
    changes = []
    for method in others:
        layout = space.layout(found.mesh, {**found.compute, METHOD: method}, found.params)
        tasks = step_tasks(space.step, layout, space.hardware, space.calibration)
        seconds, peak = sum(each.total for *_, each in tasks), memory(space.step, layout).peak
        changes.append(
            f"{' '.join(method)} {seconds / found.seconds - 1:+.1%} time, {(peak - found.peak_bytes) / GIB:+.2f} GiB"
        )
    chosen = mine.attention
    return [
        f"{math.prod(found.mesh[axis] for axis in position)} devices cut positions; attention is {chosen.strategy} "
        f"{chosen.layout} (ulysses {chosen.ulysses} x ring {chosen.ring}); instead: {'; '.join(changes)}"
    ]


def _unnamed(step: Step) -> list[str]:
    """What the trace could not follow."""
    reasons = [
        f"{count} results of {primitive} have no names: they count as whole, and what cuts them is not counted"
        for primitive, count in step.unnamed.items()
    ]
    return reasons + [f"{count} {what}" for what, count in step.simplified.items()]


def _lists(mapping: AxisMapping) -> dict[str, list[str]]:
    return {axis: list(mesh_axes) for axis, mesh_axes in mapping.items()}


@cache  # reading the metadata takes longer than measuring a layout
def _versions() -> dict[str, str]:
    """Installed versions of the packages that a plan depends on; empty where one is not installed."""
    versions = {}
    for package in ("shardplan", "jax", "haliax", "levanter", "libtpu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions
