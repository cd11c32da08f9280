"""The kinds of steps, by the names that `workload.kind` has for them."""

from shardplan.plan.workload.workload import Workload
from shardplan.steps.kind import StepKind
from shardplan.steps.loss import LossStep
from shardplan.steps.prefill import PrefillStep
from shardplan.steps.score import ScoreStep
from shardplan.steps.train import TrainStep

STEP_KINDS: dict[str, StepKind] = {kind.name: kind for kind in (LossStep(), PrefillStep(), ScoreStep(), TrainStep())}
"""Value of `workload.kind` -> the step of this kind."""


def step_of(workload: Workload) -> StepKind:
    """Return the kind of step of a workload.

    >>> type(step_of(Workload(kind="train"))).__name__
    'TrainStep'
    """
    return STEP_KINDS[workload.kind]
