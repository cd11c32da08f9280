"""The page of a plan: what its panels draw adds up to the plan, and a page from files is that of the run."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_verdicts import FITS, TOO_LARGE

from shardplan.errors import ConfigError
from shardplan.explain.what_if import Variant, WhatIf, with_settings
from shardplan.lint.findings import Severity
from shardplan.monitoring.audit import Audit, AuditedArray
from shardplan.plan.mapping import mesh_text
from shardplan.plan.parameters import ParameterPlan
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import judge, judgement_json, load_judgements, own_judgement
from shardplan.report.page.labels import (
    NO_DETAILS,
    distinct_labels,
    join_with_counts,
    repeated_runs,
    short_cause,
    short_label,
)
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.candidates import OTHER, PLAN, RUNNER_UP, candidates_panel
from shardplan.report.page.panels.headline import make_headline
from shardplan.report.page.panels.memory import NO_VERDICT, memory_panel
from shardplan.report.page.panels.parameters import parameter_rows
from shardplan.report.page.panels.repair import ComparedLayout, Defect, RepairPanel
from shardplan.report.page.panels.roofline import roofline_panel
from shardplan.report.page.panels.timeline import costs_of_step, timeline_panel
from shardplan.report.page.panels.torus import draw_slice, make_tiling, mesh_coordinates, tilings_of
from shardplan.report.page.units import LogAxis, gib_text, linear_ticks, rate_text, seconds_text
from shardplan.report.plan.attention import attention_rows
from shardplan.report.plan.parameter_groups import group_parameters
from shardplan.report.plan.tables import spec_text
from shardplan.report.templating import ended, prose
from shardplan.search.make_plan import make_plan
from shardplan.verify.verdict import CompileError

SETTINGS = (
    "--model.config=llama-3.1-8b", "--workload.batch=16", "--workload.position=2048", "--mesh.model=2",
    "--mesh.replica=2",
)  # fmt: skip
OLD_PLAN = Path(__file__).parent / "data" / "plan-0.1.json"
NEED_MESSAGES = 4
"""Panels that an old Plan has no data for: memory, time, roofline, candidates."""


@pytest.fixture(scope="module")
def plans():
    """Plans that evaluate and that train, over several mesh axes."""
    from shardplan import config

    return {
        kind: make_plan(
            config.parse_config([f"--hardware.slice={name}", f"--workload.kind={kind}", *SETTINGS])
        )
        for kind, name in (("eval", "v5e-32"), ("train", "v4-256"))
    }  # fmt: skip


@pytest.fixture
def plan(plans):
    return plans["eval"]


def judged(plan, verdict=FITS):
    """A verdict as if on `plan`."""
    return dataclasses.replace(
        verdict,
        slice=plan.hardware.slice,
        mesh=plan.mesh,
        options=plan.compiler_options,
        program=plan.workload.kind,
    )


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_live_ranges_add_up_to_the_memory_of_the_plan(plans, kind):
    plan = plans[kind]
    peak = max(plan.details.live, key=lambda point: sum(point.bytes.values()))
    assert sum(peak.bytes.values()) == pytest.approx(plan.memory.peak, abs=8)  # parts are rounded, each to a byte
    assert all(getattr(plan.memory, part) == size for part, size in peak.bytes.items())
    chart = memory_panel(plan, None).charts[0]
    assert sum(band.peak for band in chart.bands) == sum(peak.bytes.values())
    assert sum(mark.width for mark in chart.marks) == pytest.approx(100)
    assert sum(each.bytes for each in plan.details.largest) <= plan.memory.peak


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_compute_and_exposed_collectives_add_up_to_the_step(plans, kind):
    plan = plans[kind]
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


def test_tiles_are_those_of_jax():
    """Devices hold the same tile exactly where JAX gives them the same part of the array."""
    sizes = {"replica": 2, "data": 2, "model": 2}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(sizes))
    shape = {"a": 8, "b": 16}
    for spec in ([None, None], [["data"], None], [["model", "data"], ["replica"]], [["data"], ["model", "replica"]]):
        tiling = make_tiling("array", shape, spec, sizes)
        tiles = [tiling.tile(at) for at in mesh_coordinates(sizes)]
        sharding = NamedSharding(mesh, PartitionSpec(*(tuple(axes) if axes else None for axes in spec)))
        parts = sharding.devices_indices_map(tuple(shape.values()))
        indices = [tuple((part.start or 0) for part in parts[device]) for device in mesh.devices.flat]
        order = sorted(set(indices))
        assert tiles == [order.index(index) for index in indices], spec  # in row-major order
        assert set(tiles) == set(range(tiling.tiles))


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_every_replica_group_holds_each_tile_once(plans, kind):
    plan = plans[kind]
    for tiling, parameter in zip(tilings_of(plan), plan.parameters, strict=False):
        tiles = [tiling.tile(at) for at in mesh_coordinates(plan.mesh)]
        copies = plan.hardware.devices // tiling.tiles
        assert all(tiles.count(tile) == copies for tile in range(tiling.tiles)), parameter.path
        assert parameter.bytes_per_device * tiling.tiles == 2 * math.prod(parameter.axes.values()) * (
            2 if plan.workload.param_dtype == "float32" else 1
        )


@pytest.mark.parametrize(
    ("name", "mesh", "layers"),
    [
        ("v4-256", {"replica": 4, "data": 8, "model": 4}, 8),
        ("v5e-8", {"replica": 1, "data": 8, "model": 1}, 1),
        ("v3-8", {"replica": 1, "data": 4, "model": 2}, 1),
        ("tpu7x-16", {"replica": 1, "data": 8, "model": 2}, 2),
        ("2xv5e-16", {"replica": 2, "data": 16, "model": 1}, 2),
        ("cpu-8", {"replica": 2, "data": 2, "model": 2}, 2),
    ],
)
def test_every_device_is_drawn_once(name, mesh, layers):
    drawing = draw_slice(name, mesh)
    cells = [(layer.title, cell) for layer in drawing.layers for cell in layer.cells]
    assert sorted(cell.device for _, cell in cells) == list(range(math.prod(mesh.values())))
    assert len({(title, cell.x, cell.y) for title, cell in cells}) == len(cells)
    assert len(drawing.layers) == layers and len(drawing.locations) == len(cells)
    for layer in drawing.layers:
        assert all(cell.x + cell.width <= layer.width and cell.y < layer.height for cell in layer.cells)


def test_of_a_large_slice_the_first_devices_are_drawn():
    drawing = draw_slice("v5p:16x16x24", {"replica": 1, "data": 1536, "model": 4})
    assert (drawing.drawn, drawing.devices) == (2048, 6144) and len(drawing.layers) == 8


def test_mesh_axes_on_the_torus():
    drawing = draw_slice("v4-256", {"replica": 4, "data": 8, "model": 4})
    assert drawing.axes == [
        ("replica", 4, "4 along x (the whole ring)"),
        ("data", 8, "8 along z (the whole ring)"),
        ("model", 4, "4 along y (the whole ring)"),
    ]
    assert drawing.dimensions[2] == "z (from block to block): a ring of 8, data 8"
    [_, (_, _, data), _] = draw_slice("2xv5e-16", {"replica": 2, "data": 16, "model": 1}).axes
    assert data == "4 along x (the whole line) x 4 along y (the whole line)"


def test_candidates(plan):
    """The plan and the runner-up are among what was evaluated, and are marked; nothing that ties is faster."""
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


def test_layouts_compared_with_say_why_they_are_not_the_plan(plan):
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


def test_only_the_step_with_the_options_of_the_plan_is_its_verdict(plan):
    """Not the same plan with other compiler options, nor another program of it, whichever comes first."""
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


def test_slower_candidates_are_counted(plan):
    search = dataclasses.replace(plan.search, rejected={})
    details = dataclasses.replace(plan.details, slower_candidates=5)
    page = plan_page(dataclasses.replace(plan, search=search, details=details), [])
    assert f"the {len(plan.details.candidates) + 5} candidates that were evaluated" in page
    assert '<p class="dim">5 slower candidates are not drawn.</p>' in page


def test_roofline(plan):
    panel = roofline_panel(plan)
    assert {"mlp.gate_proj", "lm_head"} <= {each.label for each in panel.contractions}
    assert all(0 < each.part_of_roof <= 1.0001 for each in panel.contractions)
    assert panel.roof[1][1] == panel.roof[2][1] < panel.roof[0][1]
    assert sum(len(point.tip.splitlines()) for point in panel.points) == len(panel.contractions)


def test_headline(plan):
    line = make_headline(plan, None)
    assert line.outcome == "fits" and line.sentence.endswith("free") and not line.better
    assert len(line.costs) == 3 and line.costs[0].part >= line.costs[1].part
    missing = dataclasses.replace(plan, memory=dataclasses.replace(plan.memory, peak=plan.memory.available))
    assert make_headline(missing, None).sentence.endswith("missing")
    verdict = judge("this plan", plan, judged(plan))
    line = make_headline(plan, verdict)
    assert line.sentence == "3.00 GiB of 4.00 GiB per device by the TPU compiler, 1.00 GiB free"
    assert [each.source for each in line.figures] == ["estimate", "TPU compiler"]


def test_settings_that_help_are_named_best_first(plan):
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


def test_details_are_no_part_of_the_checksum(plan, tmp_path):
    values = plan.to_json()
    without = {name: value for name, value in values.items() if name != "details"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(without))
    assert Plan.load(str(path)) == plan and Plan.load(str(path)).details is None
    assert len(json.dumps(values["details"])) < 60_000


def test_a_page_is_one_file_without_a_network(plan):
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


def test_names_are_escaped(plan):
    """Those of models, parameters, logical axes, verdicts, and of a hand-written layout."""
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


def test_a_plan_with_settings_alone_says_what_is_missing(plan):
    """As `launch` strips a Plan of its details, and `--what_if` adds settings to it."""
    stripped = with_settings(dataclasses.replace(plan, details=None), WhatIf([Variant("as it is", plan)]))
    assert candidates_panel(stripped, []).missing == NO_DETAILS
    none_fits = dataclasses.replace(plan, details=dataclasses.replace(plan.details, candidates=[]))
    assert candidates_panel(none_fits, []).missing == "No candidate fits."


def test_a_plan_without_a_verdict_says_how_to_get_one(plan):
    """But not for CPUs, which have no TPU compiler."""
    assert memory_panel(plan, None).missing == [NO_VERDICT]
    on_cpu = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, slice="cpu-32"))
    assert memory_panel(on_cpu, None).missing == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("run `a --b x`, then `c`.", "run <code>a --b x</code>, then <code>c</code>."),
        ("`<a>` & 'b'", "<code>&lt;a&gt;</code> &amp; &#39;b&#39;"),
        ("one ` alone", "one ` alone"),
    ],
)
def test_code_in_messages(text, html):
    assert prose(text) == html


@pytest.mark.parametrize(
    ("text", "html"), [("did you mean 'x'?", "did you mean &#39;x&#39;?"), ("use 4", "use 4."), ("done.", "done.")]
)
def test_messages_end_in_one_mark(text, html):
    assert ended(text) == html


def test_pages_have_no_backticks(plan):
    assert "`" not in re.sub("<(script|style).*?</(script|style)>", "", plan_page(plan, []), flags=re.DOTALL)


def test_a_given_layout_says_that_nothing_was_searched(plan):
    search = dataclasses.replace(plan.search, given=True, runner_up=None)
    given = dataclasses.replace(plan, search=search, details=dataclasses.replace(plan.details, candidates=[]))
    assert candidates_panel(given, []).missing == "The mesh and the mappings were given: nothing was searched."


def test_verdicts_are_read_back(plan, tmp_path):
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
    with pytest.raises(ConfigError, match="cannot be read"):
        load_judgements(str(tmp_path / "none.json"))


def test_parameters(plan):
    rows = parameter_rows(plan)
    assert sum(row.bytes_per_device for row in rows) == plan.memory.parameters
    assert sum(row.elements for row in rows) == plan.model.parameters


def test_equal_parameters_are_one_row(plan, mixed_attention):
    """Of blocks of six layers; a click on the row shows the tiles of all of them. Others have no column for it."""
    _, mixed = mixed_attention
    rows = parameter_rows(mixed)
    assert sum(row.count for row in rows) == len(mixed.parameters) > len(rows)
    assert sum(row.bytes_per_device for row in rows) == mixed.memory.parameters
    assert sum(row.elements for row in rows) == mixed.model.parameters
    assert {row.stack + row.name for row in rows} < {tiling.name for tiling in tilings_of(mixed)}
    column = "<th>parameter</th><th>number</th>"
    assert column in plan_page(mixed, []) and column not in plan_page(plan, [])


def test_groups_of_parameters():
    """Only what is equal in all that is shown: several numbers make a group if all their combinations are there."""

    def parameter(path, size=8, dtype="bfloat16"):
        return ParameterPlan(path, {"embed": size}, dtype, [None], 2 * size)

    paths = [f"a[{i}].b[{j}].w" for i in range(3) for j in range(2) if (i, j) != (2, 1)]
    others = [parameter("a[3].b[0].w", 4), parameter("a[5].b[0].w"), parameter("c[7].w"), parameter("w")]
    groups = group_parameters([*map(parameter, paths), *others])
    expected = {"a[0-1].b[0-1].w": 4, "a[2,5].b[0].w": 2, "a[3].b[0].w": 1, "c[7].w": 1, "w": 1}
    assert {group.path: len(group.parameters) for group in groups} == expected
    assert [group.path for group in groups] == list(expected)


def test_the_panel_of_attention(plan, mixed_attention):
    """Where layers differ: which have which, and the seconds of all their tasks; models with one kind have none."""
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


def test_notebooks_draw_plans_and_verdicts_without_links(plan):
    for html in (plan._repr_html_(), judged(plan)._repr_html_(), judged(plan, TOO_LARGE)._repr_html_()):
        assert html.count("<rect") == plan.hardware.devices
        assert "href" not in html and "<script" not in html
    assert "does not fit" in judged(plan, TOO_LARGE)._repr_html_()


def test_a_notebook_compares_memory_with_what_decides(plan):
    """With the usable memory where a plan does not fit, even if its peak is less than a device has."""
    memory = dataclasses.replace(plan.memory, peak=plan.memory.usable + 2**27)
    assert memory.usable < memory.peak <= memory.available
    usable, available = (f" of {size / 2**30:.2f} GiB per device" for size in (memory.usable, memory.available))
    assert usable in dataclasses.replace(plan, memory=memory)._repr_html_() and available in plan._repr_html_()


def test_the_load_of_a_model_has_no_mfu(plan):
    load = dataclasses.replace(judged(plan), time=dataclasses.replace(FITS.time, model_flops=0.0, mfu=0.0))
    assert "2 s a step, by the TPU compiler" in str(load) and "MFU 25.0%" in str(judged(plan))


def test_what_shows_itself(plan):
    """A short text beside the picture, and the text of the command where it is printed."""
    bundle = plan._repr_mimebundle_()
    assert bundle["text/html"] == plan._repr_html_() and bundle["text/plain"].startswith("fits v5e-32: ")
    assert len(bundle["text/plain"].splitlines()) == 3 and "For Levanter:" in str(plan)
    assert str(judged(plan, TOO_LARGE)).splitlines()[-2].startswith("1.00 GiB too much")


def test_tiles_of_a_parameter(plan):
    tiles = plan.tiles_of("mlp.gate_proj.weight")
    path, axes, sizes = str(tiles).splitlines()
    assert path == tiles.parameter.path == "segments[0].stacked.layers[0].mlp.gate_proj.weight"
    assert axes == f"layers 32, mlp 14336, embed 4096: {spec_text(tiles.parameter.spec)} on {mesh_text(plan.mesh)}"
    tiling = make_tiling(path, tiles.parameter.axes, tiles.parameter.spec, plan.mesh)
    assert sizes.startswith(f"{tiling.tiles} tiles of 32 x ")
    assert tiles._repr_html_().count("<rect") == plan.hardware.devices
    with pytest.raises(ConfigError, match=r"no parameter mlp\.gate_prj\.weight; did you mean 'mlp\.gate_proj\.weight'"):
        plan.tiles_of("mlp.gate_prj.weight")
    with pytest.raises(ConfigError, match=r"weight is the end of several parameters: .*gate_proj\.weight, "):
        plan.tiles_of("weight")


def test_labels():
    assert short_label("transformer.layers.stacked.mlp.gate_proj.weight") == "mlp.gate_proj"
    assert short_label("segments[0].stacked.layers[1].mlp.gate_proj.weight") == "mlp.gate_proj"
    assert (
        short_label("Model/scan(layer)/Attention/contract head_size -> batch/0 1") == "Attention (contract head_size)"
    )
    backward = "transpose(jvp(Model))/scan(layer)/Mlp/Linear/contract embed -> batch, mlp/0 1 , 2 1 -> 0 2"
    assert short_label(backward) == "Mlp (contract embed)"
    assert short_cause(f"gradient of {backward}") == "gradient of Mlp (contract embed)"
    assert short_label("Model/Linear/0 1 2 , 3 2 -> 0 1 3") == "Model"
    assert distinct_labels(["a.stacked.b.weight", "c.stacked.b.weight", "d.weight"]) == [
        "a.stacked.b.weight",
        "c.stacked.b.weight",
        "d",
    ]
    assert short_cause("weights of a.stacked.b.weight") == "weights of b"
    assert short_cause("replicated for Model/scan(layer)/permute") == "replicated for permute"
    assert join_with_counts(["a", "b", "a"]) == "a (2); b"
    assert repeated_runs([1, 1, 32, 32, 32, 1, 4]) == [(2, 4, 32), (6, 6, 4)]


def test_units_and_ticks():
    assert (gib_text(3 * 2**30), gib_text(5 * 2**20), gib_text(512)) == ("3.00 GiB", "5.0 MiB", "0.5 KiB")
    assert (seconds_text(2.345), seconds_text(0.0012), seconds_text(0)) == ("2.35 s", "1.2 ms", "0 s")
    assert [seconds_text(seconds) for seconds in (0.9996, 0.9994, 999.6)] == ["1 s", "999 ms", "1,000 s"]
    assert (rate_text(9.996e14), rate_text(9.99e14)) == ("1 PFLOP/s", "999 TFLOP/s")
    assert [(tick.text, round(tick.at)) for tick in linear_ticks(31.0)] == [
        ("0", 0), ("10", 32), ("20", 65), ("30", 97),
    ]  # fmt: skip
    assert [tick.text for tick in LogAxis(1.0, 1e5).ticks()] == ["1", "10", "100", "1,000", "10,000", "100,000"]
    assert [tick.text for tick in LogAxis(0.4, 0.48).ticks()] == ["0.4", "0.42", "0.44", "0.46", "0.48"]
