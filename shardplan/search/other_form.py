"""The cost of a plan with its weights in another form on the devices: kept in fp8 as stored, or decoded."""

import json
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardplan.cost.memory import estimate_memory
from shardplan.cost.roofline import step_tasks
from shardplan.experts.planned_model import make_module
from shardplan.model.huggingface.kept_codes import stored_codes
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.program.step_trace import plan_step
from shardplan.search.ranking import Candidate


class OtherForm(NamedTuple):
    """A plan's mesh and mappings with the weights in another form."""

    kept_dtype: str | None
    """Type of weights that are kept as stored; None if they are decoded."""
    seconds: float
    """Seconds of a step."""
    peak_bytes: float
    """Peak bytes per device."""


def estimate_other_form(candidate: Candidate, model: Model, workload: Workload) -> OtherForm | None:
    """Estimate a plan with weights in the other form; None if the model has only one.

    Args:
        workload: the plan's workload, without open choices.
    """
    # training updates weights, which must be numbers
    other = None if workload.is_training else _in_other_form(model)
    if other is None:
        return None
    space = replace(candidate.space, step=plan_step(other, workload))
    assignment = space.assignment(
        candidate.mesh, candidate.compute, candidate.params, candidate.methods, experts=candidate.experts
    )
    tasks = step_tasks(space.step, assignment, space.hardware, space.calibration)
    kept_dtype = None if other.kept is None else other.kept.dtype
    seconds = sum(seconds.total for *_, seconds in tasks)
    return OtherForm(kept_dtype, seconds, estimate_memory(space.step, assignment).peak)


@lru_cache(maxsize=8)  # plans of one search ask for the same one
def _in_other_form(model: Model) -> Model | None:
    """Return a model with weights in the other form; None if its checkpoint has no codes that can be kept."""
    if not model.is_decoder:
        return None
    codes = stored_codes(json.loads(model.config.hf_config))
    if codes is None:
        return None
    config = replace(model.config, kept=codes if model.kept is None else None)
    return replace(model, config=config, template=make_module(model, config))
