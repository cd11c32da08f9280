"""The facts about a model that a verdict needs, cached because building a model takes seconds."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardplan.config.sections import CompiledProgram
from shardplan.plan.mapping import mesh_size
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.verify.case import Case

if TYPE_CHECKING:
    from shardplan.model.registry import Model


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and the workload that the compiled program does not contain."""

    flops: float
    """FLOPs that the model needs for one step over all devices; 0 for the assembly of a loaded model."""
    attended_fraction: float
    """Fraction of its query x key blocks that the attention kernel computes on the slowest device."""
    routed_rows: float | None
    """Mean number of rows per device of a grouped matmul of experts that hold a token; None without experts."""

    def save(self, path: Path) -> None:
        """Write the facts as JSON to the file `path`."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "ModelFacts | None":
        """Read the facts that `save` wrote; None if the file is missing or damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def compute_facts(case: Case) -> ModelFacts:
    """Build the model of a case, and compute the facts that a verdict on the case needs.

    Raises:
        ConfigError: the plan is for another model.
    """
    # JAX and Levanter, which take seconds to import
    from shardplan.cost.roofline import model_flops
    from shardplan.experts.planned_model import with_planned_experts
    from shardplan.model.registry import build_model
    from shardplan.search.given_plan import check_model

    plan, workload = case.plan, case.plan.workload
    model = build_model(case.hf_config, workload.position)
    if plan.experts is not None:
        model = with_planned_experts(model)
    check_model(plan, model)
    flops = model_flops(model, workload.resolve()) if case.program == CompiledProgram.STEP else 0.0
    rows = _rows_of_blocks(plan, model)
    if rows is None:
        rows = _routed_rows(plan, model.template.Pos.name, case.hf_config)
    return ModelFacts(flops, _attended_fraction(plan, model), rows)


def _attended_fraction(plan: Plan, model: "Model") -> float:
    """Return the fraction of blocks that attention kernels compute, over all kinds of it; 1 without attention."""
    from shardplan.positions.sequence_layout import attended_fraction
    from shardplan.program.step_trace import plan_step

    step = plan_step(model, dataclasses.replace(plan.workload, kind="eval", microbatches=1).resolve())
    attended = computed = 0.0
    for kind, scores in step.score_elements.items():
        method = plan.attention.of(kind.name)
        layout = method.sequence_layout(plan.workload.position)
        attended += scores * attended_fraction(layout, kind.pattern, method.gathers_keys)
        computed += scores
    return attended / computed if computed else 1.0


def _rows_of_blocks(plan: Plan, model: "Model") -> float | None:
    """Return a device's rows in an expert block if all experts get equally many; None without such blocks."""
    from shardplan.cost.experts import work_of
    from shardplan.program.step_trace import plan_step
    from shardplan.search.given_plan import assignment_of

    step = plan_step(model, plan.workload.resolve())
    assignment = assignment_of(plan, step)
    return max(
        (work_of(task, assignment).rows_of_kernel for task in step.tasks if task.experts is not None), default=None
    )


def _routed_rows(plan: Plan, position_axis: str, hf_config: Mapping[str, Any]) -> float | None:
    """Return the number of (token, expert) pairs of a microbatch per device; None for a model without experts."""
    choices = hf_config.get("num_experts_per_tok")
    if choices is None:
        return None
    mesh_axes = {axis for name in (BATCH_AXIS, position_axis) for axis in plan.compute_mapping.get(name, ())}
    tokens = plan.workload.tokens / plan.workload.num_microbatches
    return choices * tokens / mesh_size(plan.mesh, mesh_axes)
