"""What the panels of a page draw adds up to the plan: memory, time, candidates, settings, parameters, attention."""

import dataclasses
import math

import pytest
from report_plans import FITS, TOO_LARGE, judged, planned

from shardplan.explain.what_if import Variant, WhatIf, with_settings
from shardplan.report.page.judgement import judge, own_judgement
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.candidates import OTHER, PLAN, RUNNER_UP, candidates_panel
from shardplan.report.page.panels.headline import make_headline
from shardplan.report.page.panels.memory import memory_panel
from shardplan.report.page.panels.parameters import parameter_rows
from shardplan.report.page.panels.roofline import roofline_panel
from shardplan.report.page.panels.timeline import costs_of_step, timeline_panel
from shardplan.report.page.panels.torus import tilings_of
from shardplan.report.plan.attention import attention_rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eval", "train"])
def test_live_ranges_add_up_to_the_memory_of_the_plan(kind):
    plan = planned(kind)
    peak = max(plan.details.live, key=lambda point: sum(point.bytes.values()))
    assert sum(peak.bytes.values()) == pytest.approx(plan.memory.peak, abs=8)  # parts are rounded, each to a byte
    assert all(getattr(plan.memory, part) == size for part, size in peak.bytes.items())
    chart = memory_panel(plan, None).charts[0]
    assert sum(band.peak for band in chart.bands) == sum(peak.bytes.values())
    assert sum(mark.width for mark in chart.marks) == pytest.approx(100)
    assert sum(each.bytes for each in plan.details.largest) <= plan.memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eval", "train"])
def test_compute_and_exposed_collectives_add_up_to_the_step(kind):
    plan = planned(kind)
    step = plan.cost.step_seconds
    assert sum(cost.exposed_seconds for cost in costs_of_step(plan)) == pytest.approx(step)
    assert sum(cost.part for cost in costs_of_step(plan)) == pytest.approx(100)
    panel = timeline_panel(plan, None)
    assert sum(block.width for block in panel.core) == pytest.approx(100)
    assert max(block.x + block.width for block in panel.core) == pytest.approx(100)
    transfers = sum(each.seconds for task in plan.details.tasks for each in task.transfers)
    assert transfers == pytest.approx(sum(each.seconds for each in plan.cost.collectives))
    overlapped = sum(each.seconds - each.exposed_seconds for task in plan.details.tasks for each in task.transfers)
    assert sum(block.width for block in panel.links) * step / 100 == pytest.approx(overlapped)
    assert min(each.exposed_seconds for task in plan.details.tasks for each in task.transfers) >= 0


def test_candidates():
    """The plan and the runner-up are among what was evaluated, and are marked; nothing that ties is faster."""
    plan = planned("eval")
    evaluated = plan.details.candidates
    assert any(
        math.isclose(each.step_seconds, plan.cost.step_seconds) and abs(each.peak - plan.memory.peak) <= 1
        for each in evaluated
    )
    assert min(each.step_seconds for each in evaluated) >= plan.cost.step_seconds / 1.01
    assert all(each.peak <= plan.memory.usable for each in evaluated)
    panel = candidates_panel(plan, [])
    kinds = [point.kind for point in panel.points]
    assert kinds[-1] == PLAN and kinds.count(PLAN) == 1 and RUNNER_UP in kinds
    assert all(0 <= point.x <= 100 and 0 <= point.y <= 100 for point in panel.points)
    assert [each.name for each in panel.rows] == ["this plan", "runner-up"]


def test_layouts_compared_with_say_why_they_are_not_the_plan():
    plan = planned("eval")
    other = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, step_seconds=2 * plan.cost.step_seconds))
    slow = dataclasses.replace(FITS, time=dataclasses.replace(FITS.time, step_seconds=3.0))
    judgements = [
        judge("this plan", plan, judged(plan)),
        judge("slow.yaml", other, judged(plan, slow)),
        judge("large.yaml", other, judged(plan, TOO_LARGE)),
    ]
    panel = candidates_panel(plan, judgements)
    assert [point.kind for point in panel.points].count(OTHER) == 2
    why = {each.name: each.why_not for each in panel.rows}
    assert why["slow.yaml"] == "+50.0% time a token by the compiler"
    without_own = {each.name: each.why_not for each in candidates_panel(plan, judgements[1:]).rows}
    assert without_own["slow.yaml"] == "+100.0% time a token by the estimate"
    assert why["large.yaml"].startswith("does not fit: 1.00 GiB too much")
    assert panel.rows[0].compiled_seconds == FITS.time.step_seconds
    assert own_judgement(plan, judgements) == judgements[0]


def test_only_the_step_with_the_options_of_the_plan_is_its_verdict():
    """Not the same plan with other compiler options, nor another program of it, whichever comes first."""
    plan = planned("eval")
    fast = dataclasses.replace(FITS.time, step_seconds=1.0)
    judgements = [
        judge("this plan, plain", plan, dataclasses.replace(judged(plan), options={}, time=fast)),
        judge("load", plan, dataclasses.replace(judged(plan), program="load", time=fast)),
        judge("this plan, planned", plan, judged(plan)),
    ]
    assert plan.compiler_options and own_judgement(plan, judgements) == judgements[2]
    assert own_judgement(plan, judgements[:2]) is None
    panel = candidates_panel(plan, judgements)
    assert not panel.has_others and [point.kind for point in panel.points].count(PLAN) == 1
    rows = {row.name: (row.compiled_seconds, row.why_not) for row in panel.rows if row.name != "runner-up"}
    assert rows == {
        "this plan": (FITS.time.step_seconds, ""),
        "this plan, plain": (1.0, "-50.0% time a token by the compiler"),
        "load": (1.0, "another program: load"),
    }


def test_slower_candidates_are_counted():
    plan = planned("eval")
    search = dataclasses.replace(plan.search, rejected={})
    details = dataclasses.replace(plan.details, slower_candidates=5)
    page = plan_page(dataclasses.replace(plan, search=search, details=details), [])
    assert f"the {len(plan.details.candidates) + 5} candidates that were evaluated" in page
    assert '<p class="dim">5 slower candidates are not drawn.</p>' in page


def test_roofline():
    plan = planned("eval")
    panel = roofline_panel(plan)
    assert {"mlp.gate_proj", "lm_head"} <= {each.label for each in panel.contractions}
    assert all(0 < each.part_of_roof <= 1.0001 for each in panel.contractions)
    assert panel.roof[1][1] == panel.roof[2][1] < panel.roof[0][1]
    assert sum(len(point.tip.splitlines()) for point in panel.points) == len(panel.contractions)


def test_headline():
    plan = planned("eval")
    line = make_headline(plan, None)
    assert line.outcome == "fits" and line.sentence.endswith("free") and not line.better
    assert len(line.costs) == 3 and line.costs[0].part >= line.costs[1].part
    missing = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, peak=plan.memory.available))
    assert make_headline(missing, None).sentence.endswith("missing")
    verdict = judge("this plan", plan, judged(plan))
    line = make_headline(plan, verdict)
    assert line.sentence == "3.00 GiB of 4.00 GiB per device by the TPU compiler, 1.00 GiB free"
    assert [each.source for each in line.figures] == ["estimate", "TPU compiler"]


def test_settings_that_help_are_named_best_first():
    plan = planned("eval")
    faster = dataclasses.replace(plan, cost=dataclasses.replace(plan.cost, step_seconds=plan.cost.step_seconds / 2))
    variants = [
        Variant("as it is", plan),
        Variant("workload.batch 8", plan),
        Variant("workload.batch 32", faster),
        Variant("workload.param_dtype float32", None, "no plan fits"),
    ]
    line = make_headline(with_settings(plan, WhatIf(variants)), None)
    assert [change for change, _ in line.better] == ["workload.batch 32"]
    assert line.better[0][1].startswith("+100% tokens/s per device")
    assert [each.obstacle for each in line.settings] == ["", "", "no plan fits"]
    page = plan_page(with_settings(plan, WhatIf(variants[:2])), [])
    assert "<p>No other setting gains 1% or more.</p>" in page


def test_a_given_layout_says_that_nothing_was_searched():
    plan = planned("eval")
    search = dataclasses.replace(plan.search, given=True, runner_up=None)
    given = dataclasses.replace(plan, search=search, details=dataclasses.replace(plan.details, candidates=[]))
    assert candidates_panel(given, []).missing == "The mesh and the mappings were given: nothing was searched."


def test_parameters():
    plan = planned("eval")
    rows = parameter_rows(plan)
    assert sum(row.bytes_per_device for row in rows) == plan.memory.parameters
    assert sum(row.elements for row in rows) == plan.model.parameters


@pytest.mark.slow
def test_equal_parameters_are_one_row(mixed_attention):
    """Of blocks of six layers; a click on the row shows the tiles of all of them. Others have no column for it."""
    plan = planned("eval")
    _, mixed = mixed_attention
    rows = parameter_rows(mixed)
    assert sum(row.count for row in rows) == len(mixed.parameters) > len(rows)
    assert sum(row.bytes_per_device for row in rows) == mixed.memory.parameters
    assert sum(row.elements for row in rows) == mixed.model.parameters
    assert {row.stack + row.name for row in rows} < {tiling.name for tiling in tilings_of(mixed)}
    column = "<th>parameter</th><th>number</th>"
    assert column in plan_page(mixed, []) and column not in plan_page(plan, [])


def test_the_panel_of_attention(mixed_attention):
    """Where layers differ: which have which, and the seconds of all their tasks; models with one kind have none."""
    plan = planned("eval")
    _, mixed = mixed_attention
    full, window = sorted(attention_rows(mixed), key=lambda row: row.cost.layers)
    assert full.cost.layer_numbers == [5, 11, 17] and len(window.cost.layer_numbers) == 17
    page = plan_page(mixed, [])
    assert "<td>every 6th layer from 5 (3 of 20)</td>" in page and '<a href="#attention">' in page
    assert attention_rows(plan) == [] and 'href="#attention"' not in plan_page(plan, [])
    (only,) = plan.details.attention
    assert only.layer_numbers == list(range(32))
    # a Plan of an older version does not say it
    older = dataclasses.replace(mixed, details=dataclasses.replace(mixed.details, attention=[]))
    assert attention_rows(older) == []


def test_costs_of_the_layers_of_a_block_are_one(mixed_attention):
    """As those of all layers of a model whose layers are equal."""
    matmuls = [cost.what for cost in costs_of_step(mixed_attention[1]) if cost.kind == "contraction"]
    assert matmuls.count("mlp.up_proj") == 1 and not any("layers[" in what for what in matmuls)
