"""What is searched for a configuration: one space, or one for every way to fill in what the workload leaves open."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.config import Config
from shardplan.cost.calibration import calibration, quirks, usable_bytes
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import divisors, parse_slice
from shardplan.model import Model, inspect_model
from shardplan.plan.pins import Rules, parse_rules
from shardplan.plan.plan import BATCH_AXIS
from shardplan.plan.workload import workload_of
from shardplan.program.step_trace import plan_step
from shardplan.search.branch_and_bound import nearest_miss, search
from shardplan.search.mesh_subproblem import SearchStatistics
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.space import METHODS, POSITION_AXES, Space, mesh_shapes

AUTOMATIC = ("save_all", "default", "nested", "recompute")
"""Kinds of gradient checkpointing that are tried for `auto`; what is offloaded to the host has no price yet."""


@dataclass(frozen=True)
class Found:
    """A candidate."""

    config: Config
    """The configuration, with nothing left open."""
    candidate: Candidate


@dataclass(frozen=True)
class Result:
    """What was found for a configuration."""

    ranked: list[Found]
    """The fastest first; where nothing fits, what needs least memory."""
    fits: bool
    statistics: SearchStatistics
    seconds: float
    """What searching took, without the traces."""


def find(config: Config, model: Model, keep: int, own_attention: bool = False) -> Result:
    """The `keep` fastest candidates for `config`.

    Attention without a kernel is not considered while anything else fits.

    Raises:
        ConfigError: a mesh that cannot be, or a pin on what plans never cut.
        InfeasibleError: pins that no mapping keeps to.
    """
    hardware = parse_slice(config.hardware.slice)
    rules = parse_rules(config.pin, config.forbid, inspect_model(model))
    meshes = [mesh for mesh in mesh_shapes(hardware, _pinned_sizes(config, rules)) if rules.allows(mesh)]
    variants = list(_variants(config))
    ranking, statistics = Ranking(keep), SearchStatistics()
    searched: dict[int, Config] = {}
    seconds = 0.0
    for group in variants:
        beyond: list[int] = []
        for each in group:
            parts = each.workload.microbatches or 1
            # with more parts weights are gathered more often, on devices that have no more to do at once
            if any(parts % fewer == 0 for fewer in beyond):
                continue
            space = _space(each, model, rules, own_attention)
            searched[id(space)] = each
            started = time.perf_counter()
            if not search(space, meshes, ranking, statistics):
                beyond.append(parts)
            seconds += time.perf_counter() - started
    smallest: Found | None = None
    for each in itertools.chain(*variants) if not ranking.candidates else ():
        space = replace(_space(each, model, rules, own_attention), positions=POSITION_AXES, kernels=False)
        started = time.perf_counter()
        most = math.inf if smallest is None else smallest.candidate.peak_bytes
        miss = nearest_miss(space, meshes, most, statistics)
        if miss is not None and miss.peak_bytes <= space.available:
            searched[id(space)] = each
            search(space, meshes, ranking, statistics)
        elif miss is not None:
            smallest = Found(each, miss)
        seconds += time.perf_counter() - started
    if ranking.candidates:
        ranked = [Found(searched[id(candidate.space)], candidate) for candidate in ranking.candidates]
        return Result(ranked, True, statistics, seconds)
    if smallest is None:
        raise InfeasibleError(
            f"no mapping on {config.hardware.slice} keeps to pin {' '.join(config.pin) or 'nothing'} and forbid "
            f"{' '.join(config.forbid) or 'nothing'}: "
            + "; ".join(_obstacles(rules, meshes) or ["no array can have a mesh axis twice"])
            + "".join(f"; {reason}" for reason in sorted(statistics.indivisible.values()))
        )
    return Result([smallest], False, statistics, seconds)


def _pinned_sizes(config: Config, rules: Rules) -> dict[str, int | None]:
    sizes = vars(config.mesh)
    for axis, size in rules.sizes.items():
        if sizes[axis] not in (None, size):
            raise ConfigError(f"mesh.{axis} is {sizes[axis]}, and pin mesh.{axis}={size} wants another; leave one out")
    return {**sizes, **rules.sizes}


def _obstacles(rules: Rules, meshes: list[dict[str, int]]) -> list[str]:
    """What no mesh can do."""
    if not meshes:
        return ["no mesh is left"]
    return [
        f"{pin} needs a mesh with {mesh_axis} larger than 1"
        for pin in rules.pins
        for mesh_axis in pin.mesh_axes or ()
        if all(mesh[mesh_axis] == 1 for mesh in meshes)
    ]


def _variants(config: Config) -> Iterator[list[Config]]:
    """By kind of gradient checkpointing, with more and more microbatches."""
    work = config.workload
    is_training, kind, parts = work.kind == "train", work.gradient_checkpointing, work.microbatches
    kinds = (kind,) if kind != "auto" else AUTOMATIC if is_training else ("default",)
    numbers = divisors(work.batch) if is_training else (1,)
    for kind in kinds:
        yield [
            replace(config, workload=replace(work, gradient_checkpointing=kind, microbatches=n))
            for n in (numbers if parts is None else (parts,))
        ]


def _space(config: Config, model: Model, rules: Rules, own_attention: bool) -> Space:
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    is_training = config.workload.kind == "train"
    space = Space(
        step=plan_step(model, workload_of(config.workload)),
        batch=BATCH_AXIS,
        position=axes.position,
        residual=axes.residual,
        hardware=hardware,
        calibration=calibration(hardware.generation.name),
        quirks=quirks(hardware),
        available=usable_bytes(hardware),
        rules=rules,
        positions=((),) if is_training and not hardware.is_cpu else POSITION_AXES,
        kernels=not hardware.is_cpu,
        methods=() if own_attention or not model.shares_attention else METHODS[:1] if is_training else METHODS,
    )
    for pin in rules.pins:
        tokens = () if pin.at_rest else (space.batch, space.position)
        if pin.mesh_axes and pin.axis not in (*space.tensor, space.residual, *tokens):
            raise ConfigError(
                f"pin {pin}: layers are stacked along {pin.axis}, or no product has it; plans never cut it"
            )
    return space
