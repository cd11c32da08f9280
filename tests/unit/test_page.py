"""The page of a plan: one file without a network, the same from files as from the run, that says what it lacks."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec
from report_plans import TOO_LARGE, judged, planned

from shardplan.errors import ConfigError
from shardplan.explain.what_if import Variant, WhatIf, with_settings
from shardplan.lint.findings import Severity
from shardplan.monitoring.audit import Audit, AuditedArray
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import judge, judgement_json, load_judgements
from shardplan.report.page.labels import (
    NO_DETAILS,
)
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.candidates import candidates_panel
from shardplan.report.page.panels.memory import NO_VERDICT, memory_panel
from shardplan.report.page.panels.repair import ComparedLayout, Defect, RepairPanel
from shardplan.report.page.panels.timeline import costs_of_step
from shardplan.verify.verdict import CompileError

OLD_PLAN = Path(__file__).parent / "data" / "plan-0.1.json"
NEED_MESSAGES = 4
"""Panels that an old Plan has no data for: memory, time, roofline, candidates."""


def test_details_are_no_part_of_the_checksum(tmp_path):
    plan = planned("eval")
    values = plan.to_json()
    without = {name: value for name, value in values.items() if name != "details"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(without))
    assert Plan.load(str(path)) == plan and Plan.load(str(path)).details is None
    assert len(json.dumps(values["details"])) < 60_000


def test_a_page_is_one_file_without_a_network():
    plan = planned("eval")
    page = plan_page(plan, [judge("this plan", plan, judged(plan))])
    assert len(page) < 1_000_000
    assert "default-src 'none'" in page and not re.search(r"(?:src|href)=[\"']?[^#\"']|url\(|@import|https?://", page)
    restored = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert plan_page(restored, [judge("this plan", restored, judged(plan))]) == page


def odd_panel(plan, name):
    """The panel of a hand-written layout whose file and keys have a name."""
    defect = Defect(Severity.ERROR, "heads", name, name, name)
    lines = [f"-{name}", f"+{name}"]
    layout = ComparedLayout(name, name, False, name, lines, parts={}, peak=1)
    return RepairPanel(
        name, plan.hardware.slice, name, [name], [defect], [layout], plan.memory.usable, name, {name: name}
    )


def test_names_are_escaped():
    """Those of models, parameters, logical axes, verdicts, and of a hand-written layout."""
    plan = planned("eval")
    name = "</script><script>alert(1)</script>"
    model = dataclasses.replace(plan.model, ref=name, config=None)
    first, *axes = plan.parameters[0].axes.items()
    parameter = dataclasses.replace(plan.parameters[0], path=name, axes={name: first[1], **dict(axes)})
    odd = dataclasses.replace(plan, model=model, parameters=[parameter, *plan.parameters[1:]])
    verdict = dataclasses.replace(judged(plan, TOO_LARGE), reason=CompileError(name))
    judgements = [judge("this plan", odd, verdict), judge(name, plan, verdict)]
    page = plan_page(odd, judgements, odd_panel(plan, name))
    assert "<script>alert" not in page and page.count("</script>") == 2
    tiles = odd.tiles_of(name)
    audited = Audit([AuditedArray(name, {name: 4}, "bfloat16", PartitionSpec(None), 8, "")])
    for html in (odd._repr_html_(), verdict._repr_html_(), tiles._repr_html_(), audited._repr_html_()):
        assert "<script>" not in html and "&lt;script&gt;" in html


def test_an_old_plan_says_what_is_missing():
    old = Plan.load(str(OLD_PLAN))
    page = plan_page(old, [])
    assert page.count(NO_DETAILS) == NEED_MESSAGES
    assert "compute of all operations</li>" in page and "waiting for collectives, all causes</li>" in page
    assert sum(cost.exposed_seconds for cost in costs_of_step(old)) == pytest.approx(old.cost.step_seconds)


def test_a_plan_with_settings_alone_says_what_is_missing():
    """As `launch` strips a Plan of its details, and `--what_if` adds settings to it."""
    plan = planned("eval")
    stripped = with_settings(dataclasses.replace(plan, details=None), WhatIf([Variant("as it is", plan)]))
    assert candidates_panel(stripped, []).missing == NO_DETAILS
    none_fits = dataclasses.replace(plan, details=dataclasses.replace(plan.details, candidates=[]))
    assert candidates_panel(none_fits, []).missing == "No candidate fits."


def test_a_plan_without_a_verdict_says_how_to_get_one():
    """But not for CPUs, which have no TPU compiler."""
    plan = planned("eval")
    assert memory_panel(plan, None).missing == [NO_VERDICT]
    on_cpu = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, slice="cpu-32"))
    assert memory_panel(on_cpu, None).missing == []


def test_pages_have_no_backticks():
    plan = planned("eval")
    assert "`" not in re.sub("<(script|style).*?</(script|style)>", "", plan_page(plan, []), flags=re.DOTALL)


def test_verdicts_are_read_back(tmp_path, raises_message):
    plan = planned("eval")
    path = tmp_path / "verdicts.json"
    verdicts = [judgement_json("this plan", plan, judged(plan)), judgement_json("b", plan, judged(plan, TOO_LARGE))]
    path.write_text(json.dumps({"verdicts": verdicts}))
    first, second = load_judgements(str(path))
    assert first == judge("this plan", plan, judged(plan)) and second.reason.startswith("1.00 GiB too much")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "has no verdicts; name a file that verify --json wrote"),
        ('{"verdicts": [{"label": "a"}]}', "verdicts .*outcome"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_judgements(str(path))
    with raises_message(ConfigError):
        load_judgements(str(tmp_path / "none.json"))
