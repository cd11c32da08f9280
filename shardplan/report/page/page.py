"""Makes the page of a plan: all panels in one self-contained HTML file."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from shardplan.levanter_config.writer import trainer_yaml
from shardplan.plan.mapping import mapping_text, mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.page.colours import SCALE
from shardplan.report.page.judgement import Judgement, own_judgement
from shardplan.report.page.labels import kind_text
from shardplan.report.page.panels.candidates import candidates_panel
from shardplan.report.page.panels.experts import ExpertsPanel
from shardplan.report.page.panels.headline import make_headline
from shardplan.report.page.panels.memory import memory_panel
from shardplan.report.page.panels.parameters import parameter_rows
from shardplan.report.page.panels.repair import RepairPanel
from shardplan.report.page.panels.roofline import roofline_panel
from shardplan.report.page.panels.selection import SelectionPanel
from shardplan.report.page.panels.timeline import timeline_panel
from shardplan.report.page.panels.torus import (
    axis_uses,
    default_tiling,
    draw_slice,
    largest_on_device,
    tensor_choices,
    tilings_of,
)
from shardplan.report.page.units import gib_text, rate_text, seconds_text
from shardplan.report.plan.attention import attention_rows
from shardplan.report.plan.tables import MEMORY_PARTS, workload_text
from shardplan.report.templating import environment, script_hash, template_text


def plan_page(
    plan: Plan,
    judgements: Sequence[Judgement],
    repair: RepairPanel | None = None,
    experts: ExpertsPanel | None = None,
    selection: SelectionPanel | None = None,
) -> str:
    """Return the page of a plan.

    Args:
        judgements: verdicts of the compiler, on the plan and on others that it is compared with.
        repair: review of a hand-written layout, for which `plan` is the prediction.
        experts: the section `experts` of an evaluation that measured how tokens were routed.
        selection: the section `selection` of a training that measured which blocks sparse attention selected.
    """
    judgement = own_judgement(plan, judgements)
    tilings, timeline, roofline = tilings_of(plan), timeline_panel(plan, judgement), roofline_panel(plan)
    script = template_text("plan.js")
    template = environment().get_template("plan_page.html")
    return template.render(
        plan=plan,
        judgement=judgement,
        mesh=mesh_text(plan.mesh),
        workload=workload_text(plan.workload),
        mappings={"compute": mapping_text(plan.compute_mapping), "parameters": mapping_text(plan.param_mapping)},
        headline=make_headline(plan, judgement),
        torus=draw_slice(plan.hardware.slice, plan.mesh),
        scale=SCALE,
        tilings=list(map(asdict, tilings)),
        choices=tensor_choices(tilings),
        # of a hand-written layout, what fills the devices is what its author has to see first
        selected=default_tiling(tilings) if repair is None else largest_on_device(plan),
        uses=axis_uses(plan),
        memory=memory_panel(plan, judgement),
        timeline=timeline,
        roofline=roofline,
        roofline_segments=list(pairwise(roofline.roof)),
        attention=attention_rows(plan),
        candidates=candidates_panel(plan, judgements),
        parameters=parameter_rows(plan),
        repair=repair,
        experts=experts,
        selection=selection,
        parts=MEMORY_PARTS,
        yaml=repair.section if repair is not None else trainer_yaml(plan),
        compiler_options=repair.compiler_options if repair is not None else plan.compiler_options,
        style=template_text("style.css") + template_text("colours.css") + template_text("plan.css"),
        script=script,
        script_hash=script_hash(script),
        kind_text=kind_text,
        gib=gib_text,
        seconds=seconds_text,
        rate=rate_text,
    )
