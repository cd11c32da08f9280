"""Searches for the plan of a configuration: in one space, or in one per value that the workload leaves open."""

import itertools
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from shardplan.config import PlanConfig
from shardplan.cost.calibration import calibration_of, compiler_quirks, usable_bytes, usable_host_bytes
from shardplan.decoder.layers.sparse_layers import selected_method
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import Slice, parse_slice
from shardplan.hardware.mesh_axes import POSITION_CHOICES
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import Strategy
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.pins import Rules, parse_rules
from shardplan.plan.workload.checkpointing import DEFAULT, OPEN_CHECKPOINTING
from shardplan.plan.workload.workload import BATCH_AXIS, Workload
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.step_trace import plan_kept_activations, plan_step
from shardplan.program.variants.kept_activations import KeptActivations
from shardplan.runtime.garbage import without_garbage_collection
from shardplan.search.branch_and_bound import find_smallest, search_meshes
from shardplan.search.components.compute_sharding import METHODS, AttentionMethod
from shardplan.search.open_choices import WorkloadVariant, enumerate_variants
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.reasons import SearchStatistics, describe_indivisible
from shardplan.search.space import Space, mesh_shapes

UNSHARDED_POSITIONS: tuple[MeshAxes, ...] = ((),)
"""The choice of no mesh axes for positions, as packed windows require."""
RELAXATIONS: tuple[dict[str, Any], ...] = (
    {"allows_idle": True},
    {"allows_idle": True, "requires_kernel": False, "position_choices": POSITION_CHOICES},
)
"""Relaxations of the space, tried in order while nothing fits: idle mesh axes, then also attention without a kernel."""


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate, and its configuration."""

    config: PlanConfig
    """The configuration, with nothing left open."""
    candidate: Candidate


@dataclass(frozen=True)
class SearchResult:
    """The result of the search for a configuration."""

    ranked: list[RankedCandidate]
    """Candidates, the fastest first; if nothing fits, only the candidate with the smallest peak memory."""
    fits: bool
    is_exhaustive: bool
    """Whether bounds prove that no skipped candidate is better; False if multiples of a slow number were skipped."""
    statistics: SearchStatistics
    seconds: float
    """Seconds of the search, without tracing."""
    evaluated: list[Candidate]
    """Every candidate that fits and that no bound excluded, the fastest first."""


@without_garbage_collection()
def search_configuration(config: PlanConfig, model: Model, keep: int, own_attention: bool = False) -> SearchResult:
    """Search for the `keep` fastest candidates for `config`.

    Candidates with an idle mesh axis or without an attention kernel are considered only if nothing else fits.

    Raises:
        ConfigError: an impossible mesh, or a pin on a logical axis that plans never shard.
        InfeasibleError: no mapping satisfies the pins.
    """
    hardware = parse_slice(config.hardware.slice)
    rules = parse_rules(config.pin, config.forbid, inspect_model(model))
    meshes = [mesh for mesh in mesh_shapes(hardware, _pinned_sizes(config, rules)) if rules.allows(mesh)]
    variants = list(enumerate_variants(config, model.vocab.size, _has_options(config, model)))
    ranking, statistics = Ranking(keep), SearchStatistics()
    searched: dict[int, PlanConfig] = {}
    seconds, is_exhaustive = 0.0, True
    too_slow: list[list[tuple[int, ...]]] = [[] for _ in variants]
    # the fewest parts of all kinds come first: what fits with them rules out most others, which need not be traced
    for of_kinds in itertools.zip_longest(*variants):
        for variant, slow in zip(of_kinds, too_slow, strict=True):
            # more parts gather weights more often, and leave a device no more to compute at once: no proof
            if variant is None or any(map(variant.is_multiple_of, slow)):
                is_exhaustive &= variant is None
                continue
            space = _build_space(variant, model, rules, own_attention)
            # a candidate keeps its space, so that no later space has the id
            searched[id(space)] = variant.config
            started = time.perf_counter()
            if not search_meshes(space, meshes, ranking, statistics):
                slow.append(variant.numbers)
            seconds += time.perf_counter() - started
    smallest: RankedCandidate | None = None
    full_host: RankedCandidate | None = None
    for relaxation in RELAXATIONS:
        for variant in itertools.chain(*variants) if not ranking.candidates else ():
            choice = variant.config
            space = replace(_build_space(variant, model, rules, own_attention), **relaxation)
            # the windows of a sequence are apart only where a device has all of it
            if choice.workload.window is not None:
                space = replace(space, position_choices=UNSHARDED_POSITIONS)
            started = time.perf_counter()
            limit_bytes = math.inf if smallest is None else smallest.candidate.peak_bytes
            candidate = find_smallest(space, meshes, limit_bytes, statistics)
            if candidate is not None and candidate.peak_bytes <= space.available_bytes:
                searched[id(space)] = choice
                search_meshes(space, meshes, ranking, statistics)
                full_host = _with_chosen_policy(model, choice, candidate)  # unless the search found another one
            elif candidate is not None:
                smallest = _with_chosen_policy(model, choice, candidate)
            seconds += time.perf_counter() - started
    if ranking.candidates:
        ranked = [
            _with_chosen_policy(model, searched[id(candidate.space)], candidate) for candidate in ranking.candidates
        ]
        return SearchResult(ranked, True, is_exhaustive, statistics, seconds, ranking.evaluated)
    smallest = smallest or full_host
    if smallest is None:
        raise _unsatisfiable_error(config, rules, meshes, statistics)
    return SearchResult([smallest], False, is_exhaustive, statistics, seconds, [])


def _kept_activations(variant: WorkloadVariant, model: Model, hardware: Slice) -> KeptActivations | None:
    """Return the options for a step's activations; None if there are none to choose.

    With several microbatches nothing is copied to the host: the compiler hides copies in a loop over layers less well
    where this is itself in a loop (docs/log.md).
    """
    workload = variant.config.workload.resolve()
    return plan_kept_activations(model, workload, not hardware.is_cpu and workload.num_microbatches == 1)


def _has_options(config: PlanConfig, model: Model) -> bool:
    """Return whether a training step's activations are open and their options known."""
    work = config.workload
    if not work.is_training or work.gradient_checkpointing != OPEN_CHECKPOINTING:
        return False
    workload = replace(work, gradient_checkpointing=DEFAULT, microbatches=1).resolve()
    return plan_kept_activations(model, workload, not parse_slice(config.hardware.slice).is_cpu) is not None


def _with_chosen_policy(model: Model, config: PlanConfig, candidate: Candidate) -> RankedCandidate:
    """If a candidate's space leaves the checkpointing policy open, return it in the space of its chosen policy.

    It takes the same time and memory there: options about activations add up (`tests/unit/test_kept_activations.py`).
    """
    if candidate.checkpointing is None:
        return RankedCandidate(config, candidate)
    workload = replace(config.workload, gradient_checkpointing=str(candidate.checkpointing))
    space = replace(candidate.space, step=plan_step(model, workload.resolve()), kept=None)
    return RankedCandidate(replace(config, workload=workload), replace(candidate, space=space, checkpointing=None))


def _pinned_sizes(config: PlanConfig, rules: Rules) -> dict[str, int | None]:
    """Return mesh axis -> size that `mesh` or a pin gives; None if the size is open."""
    sizes = vars(config.mesh)
    for axis, size in rules.sizes.items():
        if sizes[axis] not in (None, size):
            raise ConfigError(
                f"mesh.{axis} is {sizes[axis]}, and pin mesh.{axis}={size} requires {size}; leave one of the two out"
            )
    return {**sizes, **rules.sizes}


def _unsatisfiable_error(
    config: PlanConfig, rules: Rules, meshes: list[dict[str, int]], statistics: SearchStatistics
) -> InfeasibleError:
    """Return the error that no mapping satisfies the user's requirements, with a list of them."""
    given = [f"{key} {' '.join(texts)}" for key, texts in (("pin", config.pin), ("forbid", config.forbid)) if texts]
    required = " and ".join(given)
    obstacles = _unsatisfiable(rules, meshes)
    batch = config.workload.batch
    indivisible = describe_indivisible(statistics.indivisible.values(), batch)
    if not obstacles:
        obstacles = ["every mapping has a mesh axis on two dimensions of one array"]
    return InfeasibleError(
        f"no mapping on {config.hardware.slice} {f'satisfies {required}' if required else 'is possible'}: "
        f"{'; '.join([*obstacles, *indivisible])}"
    )


def _unsatisfiable(rules: Rules, meshes: list[dict[str, int]]) -> list[str]:
    """Describe the requirements that no mesh satisfies."""
    if not meshes:
        return ["no mesh is left"]
    return [
        f"{pin} needs a mesh with {mesh_axis} larger than 1"
        for pin in rules.pins
        for mesh_axis in pin.mesh_axes or ()
        if all(mesh[mesh_axis] == 1 for mesh in meshes)
    ]


def _build_space(variant: WorkloadVariant, model: Model, rules: Rules, own_attention: bool) -> Space:
    """Build the search space of a configuration with a fully specified workload.

    Args:
        own_attention: whether only the model's own attention is a choice.

    Raises:
        ConfigError: a pin shards a logical axis that plans never shard.
    """
    config = variant.config
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    is_training = config.workload.is_training
    step = plan_step(model, config.workload.resolve())
    space = Space(
        step=step,
        logit_blocks=config.workload.num_logit_blocks,
        batch=BATCH_AXIS,
        position=axes.position,
        residual=axes.residual,
        hardware=hardware,
        calibration=calibration_of(step, hardware),
        quirks=compiler_quirks(hardware),
        available_bytes=usable_bytes(hardware),
        host_available_bytes=usable_host_bytes(hardware, config.hardware.host_gib),
        rules=rules,
        position_choices=_position_choices(config.workload, hardware, step.attention_kinds),
        requires_kernel=not hardware.is_cpu,
        methods=attention_methods(model, step.attention_kinds, is_training, own_attention),
        kept=_kept_activations(variant, model, hardware) if variant.keeps_open else None,
    )
    for pin in rules.pins:
        tokens = () if pin.is_stored else (space.batch, space.position)
        if pin.mesh_axes and pin.axis not in (*space.tensor_axes, space.residual, *tokens):
            reason = "layers are stacked along it" if pin.axis in space.step.stacked_axes else "no computation uses it"
            raise ConfigError(f"pin {pin}: plans never shard {pin.axis}, for {reason}")
        if pin.mesh_axes and not pin.is_stored and pin.axis in step.sparse_axes:
            raise ConfigError(
                f"pin {pin}: plans never shard {pin.axis} in computations of native sparse attention, for the heads of "
                "a group select blocks by one sum; shard the axis of groups (kv_head)"
            )
    return space


def _position_choices(workload: Workload, hardware: Slice, kinds: Collection[AttentionKind]) -> tuple[MeshAxes, ...]:
    """Return the mesh axes that positions may be mapped to, unless they are pinned.

    Training on TPUs shards positions only for models with Native Sparse Attention, whose layers shard positions
    themselves.
    """
    shards_itself = any(kind.sparse is not None for kind in kinds)
    in_training = hardware.is_cpu or shards_itself
    is_possible = workload.window is None and (in_training or not workload.is_training)
    return POSITION_CHOICES if is_possible else UNSHARDED_POSITIONS


def attention_methods(
    model: Model, kinds: Collection[AttentionKind], is_training: bool = False, own_attention: bool = False
) -> tuple[AttentionMethod, ...]:
    """Return the methods of attention that a plan can use for a model if positions are sharded.

    Training keeps positions in the order of the sequence, because Levanter's loss takes the next token as each
    position's target.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(is_decoder=False, is_attention_planned=True)
    >>> [f"{method.strategy} {method.order}" for method in attention_methods(model, (), is_training=True)]
    ['all_gather contiguous']

    Args:
        kinds: the kinds of attention in the model; used for models whose attention shardplan does not replace.
        own_attention: whether only the model's own attention is a choice. Native Sparse Attention shards positions
            itself.
    """
    contiguous = tuple(method for method in METHODS if method.order == SequenceOrder.CONTIGUOUS)
    if model.is_decoder and selected_method(model.config.segments) is not None:
        # queries select blocks of the whole sequence, so that their keys are gathered
        gathering = tuple(method for method in METHODS if method.strategy == Strategy.ALL_GATHER)
        return gathering[:1] if is_training else gathering
    if own_attention:
        return ()
    if model.is_attention_planned:
        return METHODS[:1] if is_training else METHODS
    if not kinds or not all(kind.can_shard_positions for kind in kinds):
        return ()
    # whether a model of your own takes positions in another order than the sequence is not known
    return contiguous[:1] if is_training else contiguous
