"""The Plan as the `trainer:` section of a Levanter configuration."""

from typing import Any

import yaml

from shardplan.plan.plan import BATCH_AXIS, Mapping, Plan


def trainer_section(plan: Plan) -> dict[str, Any]:
    """Levanter's `trainer:` keys for the plan's mesh and mappings.

    Levanter lays devices out as (replica, data, model), data being what is left, and always maps the batch axis to
    (replica, data). Axes that rest on several mesh axes are left out: see `inexpressible`.
    """
    work = plan.workload
    compute = {axis: mesh_axes for axis, mesh_axes in plan.compute_mapping.items() if axis != BATCH_AXIS}
    return {
        "mp": f"p={work.param_dtype},c={work.compute_dtype}",
        "replica_ici_axis_size": plan.mesh["replica"],
        "model_axis_size": plan.mesh["model"],
        "train_batch_size": work.batch,
        "per_device_eval_parallelism": work.batch // (plan.mesh["replica"] * plan.mesh["data"]),
        "fsdp_axis": None,
        "axis_resources": _single(compute),
        "parameter_axis_resources": _single(plan.param_mapping),
    }


def inexpressible(plan: Plan) -> Mapping:
    """Axes that rest on several mesh axes.

    Levanter 1.2.dev1644 declares its mappings as `Tuple[str]`, exactly one, and decodes a longer list as the text of
    the list, which then names no mesh axis: it can be given these in Python only.
    """
    return {axis: mesh_axes for axis, mesh_axes in plan.param_mapping.items() if len(mesh_axes) > 1}


def trainer_yaml(plan: Plan) -> str:
    """`trainer_section` as text to paste; what YAML cannot say follows as a comment."""
    text = yaml.safe_dump({"trainer": trainer_section(plan)}, sort_keys=False, default_flow_style=None, width=120)
    rest = inexpressible(plan)
    if rest:
        mapping = ", ".join(f"{axis}: [{', '.join(mesh_axes)}]" for axis, mesh_axes in rest.items())
        text += f"  # in Python only, for Levanter reads no list of mesh axes from YAML: {{{mapping}}}\n"
    return text


def _single(mapping: Mapping) -> dict[str, str]:
    return {axis: mesh_axes[0] for axis, mesh_axes in mapping.items() if len(mesh_axes) == 1}
