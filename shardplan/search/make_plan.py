"""Defines make_plan, which searches for the fastest plan of a model and workload that fits on a slice."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.cost.calibration import usable_bytes
from shardplan.cost.memory import estimate_memory, host_bytes
from shardplan.cost.roofline import step_tasks
from shardplan.decoder.layers.expert_layers import has_corrections
from shardplan.errors import InfeasibleError
from shardplan.experts.measured_load import measured_load_spread
from shardplan.experts.planned_model import with_planned_experts
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.plan.file.sections import Caveat, RunnerUp, SearchInfo
from shardplan.plan.layer_numbers import layers_by_kind
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import Workload
from shardplan.search.fastest_batch import choose_batch
from shardplan.search.other_form import estimate_other_form
from shardplan.search.ranking import Candidate
from shardplan.search.reasons import (
    CAVEATS,
    Alternative,
    caveats_of,
    describe_attention,
    describe_choice,
    describe_experts,
    describe_host_copies,
    describe_indivisible,
    describe_other_form,
    describe_runner_up,
    describe_sparse_obstacles,
    describe_time,
    describe_trace,
    describe_training_order,
    describe_uneven_load,
    describe_unsharded_heads,
    method_name,
)
from shardplan.search.result.assignment_to_plan import StepCost, build_plan, estimate_cost
from shardplan.search.result.attention_costs import attention_costs
from shardplan.search.result.plan_details import plan_details
from shardplan.search.search_configuration import RankedCandidate, SearchResult, search_configuration
from shardplan.storage import Folder, open_folder


def make_plan(
    config: PlanConfig, model: Model | None = None, nearest_miss: bool = False, own_attention: bool = False
) -> Plan:
    """Return the Plan with the fastest mesh and mappings that fit.

    >>> from shardplan.config import load_config
    >>> config = load_config(model={"config": "pythia-70m"}, hardware={"slice": "v5e-4"})
    >>> plan = make_plan(config)
    >>> plan.mesh, plan.compute_mapping
    ({'replica': 1, 'data': 4, 'model': 1}, {'batch': ['data']})

    Args:
        config: model, hardware, mesh and workload; see `shardplan.config`.
        model: the model, if it has been built already.
        nearest_miss: if nothing fits, return the plan with the smallest peak memory instead of raising.
        own_attention: plan for the model's own attention, as Levanter's programs compute it. Levanter's has no kernel
            if positions are sharded; Native Sparse Attention shards them itself.

    Raises:
        ConfigError: an unusable configuration.
        InfeasibleError: nothing fits; the message says how much memory is missing at least.
    """
    check_config("make_plan", config)
    return rank_plans(config, 1, model, nearest_miss, own_attention)[0]


def rank_plans(
    config: PlanConfig,
    count: int,
    model: Model | None = None,
    nearest_miss: bool = False,
    own_attention: bool = False,
) -> list[Plan]:
    """Return the `count` fastest plans that fit, the fastest first; fewer if there are fewer. See `make_plan`.

    Any two plans differ in the mesh, in the mesh axes of batch, positions or the stored residual axis, or in a choice
    that the workload leaves open. If several components have attention, they may differ in its method alone.

    >>> from shardplan.config import load_config
    >>> config = load_config(model={"config": "pythia-70m"}, hardware={"slice": "v5e-4"})
    >>> [plan.param_mapping for plan in rank_plans(config, 2)]
    [{}, {'embed': ['data']}]
    """
    model = model or model_from_config(config)
    config = choose_batch(fit_position(config, model), model, own_attention)
    # one more than is returned, because each plan names the next one as its runner-up
    result = search_configuration(config, model, count + 1, own_attention)
    if not result.fits and not nearest_miss:
        raise _infeasible_error(result.ranked[0], config.workload)
    pairs = list(zip(result.ranked, [*result.ranked[1:], None], strict=True))
    return [_plan(model, result, ranked, runner_up) for ranked, runner_up in pairs[:count]]


def model_from_config(config: PlanConfig) -> Model:
    """Build the model that the configuration names, without weights.

    >>> from shardplan.config import load_config
    >>> model = model_from_config(load_config(model={"config": "pythia-70m"}))
    >>> model.type, model.vocab.size
    ('gpt_neox', 50304)
    """
    folder = open_folder(config.model.ref) if config.model.config is None else None
    return model_in_folder(config, folder)


def model_in_folder(config: PlanConfig, folder: Folder | None) -> Model:
    """Build the model that the configuration names, without weights, from an open folder.

    >>> from shardplan.config import load_config
    >>> model_in_folder(load_config(model={"config": "pythia-70m"}), None).positions
    2048

    Args:
        folder: folder of the checkpoint; None if `model.config` names a config.json.
    """
    hf_config = read_config(config.model.config, folder, config.model_class, config.load.keep_dtype)
    return build_configured(config, hf_config)


def build_configured(config: PlanConfig, hf_config: dict[str, Any]) -> Model:
    """Build the model of a config.json, without weights, for the positions of the workload.

    If `workload.position` has its default, it is limited to the positions of the model. Experts of Levanter's classes
    are computed by shardplan's expert blocks, which plans can shard.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    >>> config_json = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512, **sizes}
    >>> from shardplan.config.sections import ModelConfig
    >>> build_configured(PlanConfig(ModelConfig(config="config.json")), config_json).positions
    512
    """
    return with_planned_experts(build_model(hf_config, config.workload.position, shorten=_has_default_position(config)))


def fit_position[C: PlanConfig](config: C, model: Model) -> C:
    """Limit the default number of positions to the model's.

    >>> from types import SimpleNamespace
    >>> from shardplan.config.sections import ModelConfig
    >>> config = PlanConfig(ModelConfig(config="gpt2-large"))
    >>> fit_position(config, SimpleNamespace(positions=1024)).workload.position
    1024
    """
    position = config.workload.position
    if not _has_default_position(config) or position <= model.positions:
        return config
    return replace(config, workload=replace(config.workload, position=model.positions))


def _has_default_position(config: PlanConfig) -> bool:
    """Return whether the number of positions has its default."""
    work = config.workload
    return "workload.position" not in config.given and work.window is None and work.position == Workload.position


def _infeasible_error(smallest: RankedCandidate, requested: Workload) -> InfeasibleError:
    """Return the error that no plan fits, with the nearest miss and the missing memory.

    Args:
        requested: the workload as configured, with open choices.
    """
    candidate, hardware = smallest.candidate, smallest.candidate.space.hardware
    if candidate.peak_bytes <= candidate.space.available_bytes:
        return _full_host_error(candidate)
    usable, available = usable_bytes(hardware) / GIB, hardware.generation.hbm_gib
    needed = candidate.peak_bytes / GIB
    # microbatches that are left open have all been tried
    allows_more = requested.is_training and requested.microbatches is not None
    more = ", more workload.microbatches" if allows_more else ""
    return InfeasibleError(
        f"no plan fits {hardware.name}: the nearest miss, mesh {mesh_text(candidate.mesh)}, needs {needed:.2f} GiB per "
        f"device, and {usable:.2f} GiB are usable ({available:.2f} less {available - usable:.2f} for the error of the "
        f"estimate): {needed - usable:.2f} GiB are missing; use a larger hardware.slice, a smaller workload.batch or "
        f"workload.position{more}, or a narrower dtype"
    )


def _full_host_error(candidate: Candidate) -> InfeasibleError:
    """Return the error for hosts without space for the activations that are moved there."""
    space = candidate.space
    needed, usable = host_bytes(space.step, candidate.assignment) / GIB, space.host_available_bytes / GIB
    return InfeasibleError(
        f"no plan fits {space.hardware.name}: mesh {mesh_text(candidate.mesh)} moves {needed:.2f} GiB of activations "
        f"to the host for each device, and {usable:.2f} GiB are usable: {needed - usable:.2f} GiB are missing; "
        "move fewer (workload.gradient_checkpointing), set hardware.host_gib if hosts have more, or use a larger "
        "hardware.slice"
    )


def _plan(
    model: Model,
    result: SearchResult,
    ranked: RankedCandidate,
    runner_up: RankedCandidate | None,
) -> Plan:
    """Return the plan of a ranked candidate, with the reasons for it.

    Args:
        runner_up: the next candidate, if there is one.
    """
    candidate, config = ranked.candidate, ranked.config
    space, assignment = candidate.space, candidate.assignment
    cost = estimate_cost(space.step, assignment, space.hardware)
    attention = attention_costs(model, config.workload.resolve(), space.step, assignment, space.hardware)
    caveats = list(_caveats(ranked))
    info = SearchInfo(
        candidates=result.statistics.evaluated,
        proven_optimal=result.fits and result.is_exhaustive and ranked is result.ranked[0],
        seconds=result.seconds,
        runner_up=RunnerUp(runner_up.candidate.mesh, runner_up.candidate.seconds) if runner_up else None,
        rejected={rejection.value: count for rejection, count in result.statistics.rejected.items()},
        reasons=[
            *_choice_reasons(result, ranked, runner_up, cost),
            *(CAVEATS[caveat] for caveat in caveats),
            *_host_reasons(candidate, cost),
            *_attention_reasons(candidate, layers_by_kind(attention)),
            *describe_unsharded_heads(space.step.sparse_axes),
            *describe_sparse_obstacles(space.sparse_obstacles),
            *describe_training_order(
                ranked.config.workload.is_training, space.position in candidate.compute, space.step.attention_kinds
            ),
            *_expert_reasons(candidate, model),
            *_form_reasons(ranked, model),
            *describe_trace(space.step),
        ],
        caveats=caveats,
    )
    plan = build_plan(config, model, space.step, assignment, cost.plan, info)
    return replace(plan, details=plan_details(space.step, assignment, space.hardware, result.evaluated, attention))


def _caveats(ranked: RankedCandidate) -> Iterator[Caveat]:
    space = ranked.candidate.space
    # a space for TPUs is searched without this requirement only after nothing has fitted (`RELAXATIONS`)
    if space.step.has_attention and not space.requires_kernel and not space.hardware.is_cpu:
        yield Caveat.NO_ATTENTION_KERNEL
    yield from caveats_of(ranked.candidate.assignment)


def _host_reasons(candidate: Candidate, cost: StepCost) -> Iterator[str]:
    """Yield the reason that describes the activations kept in host memory; nothing if there are none."""
    if cost.host_copy_seconds:
        size = host_bytes(candidate.space.step, candidate.assignment)
        yield describe_host_copies(size, cost.host_copy_seconds, cost.exposed_host_copy_seconds)


def _choice_reasons(
    result: SearchResult,
    ranked: RankedCandidate,
    runner_up: RankedCandidate | None,
    cost: StepCost,
) -> list[str]:
    """Explain why the plan was chosen, and which shardings were impossible; takes the arguments of `_plan`."""
    plan, statistics = cost.plan, result.statistics
    space = ranked.candidate.space
    has_kernel = space.step.has_attention and space.requires_kernel
    reasons = [
        describe_choice(fits=result.fits, evaluated=statistics.evaluated, has_kernel=has_kernel),
        describe_time(
            plan.step_seconds,
            plan.compute_seconds,
            cost.weight_gather_seconds,
            cost.other_collective_seconds,
            cost.exposed_host_copy_seconds,
        ),
    ]
    if runner_up is not None:
        settings, other_settings = (each.config.workload.settings_text() for each in (ranked, runner_up))
        if other_settings == settings:
            other_settings = ""
        elif not other_settings:
            other_settings = "all logits at once"
        reasons.append(describe_runner_up(ranked.candidate, runner_up.candidate, other_settings))
    batch = ranked.config.workload.batch
    indivisible = describe_indivisible(statistics.indivisible.values(), batch)
    return [*reasons, f"excluded: {'; '.join(indivisible)}"] if indivisible else reasons


def _attention_reasons(candidate: Candidate, layers: Mapping[str, str]) -> list[str]:
    """Explain how attention is computed, if the plan chooses it, and compare other methods.

    Args:
        layers: name of each kind of attention -> its layers, in words.
    """
    space, assignment = candidate.space, candidate.assignment
    position_axes = assignment.compute.get(space.position, ())
    chosen = candidate.methods
    if not chosen:
        return []
    devices = math.prod(candidate.mesh[axis] for axis in position_axes)
    alternatives: dict[str, list[Alternative]] = {}
    for methods in space.methods_for(candidate.mesh, position_axes):
        # one kind at a time, so that each alternative has the effect of one change
        changed = [i for i, method in enumerate(methods or ()) if method != chosen[i]]
        if methods is None or len(changed) != 1:
            continue
        other = space.assignment(
            candidate.mesh, candidate.compute, candidate.params, methods, experts=candidate.experts
        )
        tasks = step_tasks(space.step, other, space.hardware, space.calibration)
        seconds = sum(seconds.total for *_, seconds in tasks)
        kind, name = space.step.attention_kinds[changed[0]].name, method_name(methods[changed[0]], devices)
        alternative = Alternative(name, seconds, estimate_memory(space.step, other).peak)
        alternatives.setdefault(kind, []).append(alternative)
    if not alternatives:
        return []
    return describe_attention(candidate, layers, devices, alternatives)


def _expert_reasons(candidate: Candidate, model: Model) -> list[str]:
    """Explain how routed experts are computed, and what would change their time; empty without experts."""
    space = candidate.space
    if not space.step.expert_blocks:
        return []
    token_axes = {mesh_axis for axis in (space.batch, space.position) for mesh_axis in candidate.compute.get(axis, ())}
    expert_axes = tuple(
        mesh_axis for block in space.step.expert_blocks for mesh_axis in candidate.compute.get(block.experts, ())
    )
    alternatives = []
    for strategy in space.expert_strategies(token_axes, expert_axes):
        if strategy != candidate.experts:
            other = space.assignment(
                candidate.mesh, candidate.compute, candidate.params, candidate.methods, experts=strategy
            )
            tasks = step_tasks(space.step, other, space.hardware, space.calibration)
            seconds = sum(seconds.total for *_, seconds in tasks)
            alternatives.append(Alternative(strategy, seconds, estimate_memory(space.step, other).peak))
    return [*describe_experts(candidate, alternatives), *_uneven_load(candidate, model)]


def _form_reasons(ranked: RankedCandidate, model: Model) -> list[str]:
    """Explain the effect of keeping weights as stored, or of decoding them; empty without codes."""
    workload = ranked.config.workload.resolve()
    other = estimate_other_form(ranked.candidate, model, workload)
    return [] if other is None else [describe_other_form(ranked.candidate, other, workload.param_dtype)]


def _uneven_load(candidate: Candidate, model: Model) -> list[str]:
    """If an even load is assumed, explain how the uneven load of trained models would change the step."""
    space = candidate.space
    spread = measured_load_spread(model.is_decoder and has_corrections(model.config.segments))
    even, uneven = [], []
    for task in space.step.tasks:
        if task.experts is None:
            continue
        if task.experts.load_spread:
            return []
        even.append(task)
        uneven.append(replace(task, experts=replace(task.experts, load_spread=spread)))
    even_seconds, uneven_seconds = (
        sum(seconds.total for *_, seconds in step_tasks(step, candidate.assignment, space.hardware, space.calibration))
        for step in (replace(space.step, tasks=tuple(tasks)) for tasks in (even, uneven))
    )
    return [describe_uneven_load(candidate, spread, candidate.seconds + uneven_seconds - even_seconds)]
