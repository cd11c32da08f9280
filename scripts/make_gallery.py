"""python scripts/make_gallery.py

Plans what docs/gallery shows, and writes its reports, pictures and page. A verdict of the TPU compiler is kept as long
as the planned program is the same; another one is compiled, in a few minutes. Delete the files in docs/gallery/verdicts
to have all of them compiled. Last it draws the first panels of a report (docs/howto/report.png), if playwright is
installed and there is a Chromium on the path, or one that `playwright install chromium` has installed.
"""

import dataclasses
import json
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gallery import ENTRIES, FOLDER, Entry, made_files

from shardplan.config import parse_config
from shardplan.config.command_flags import PlanCommand
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import estimate_of, judgement_json
from shardplan.report.page.panels.repair import RepairPanel

ROOT = FOLDER.parent.parent
OWN = "this plan"
"""Label of the verdict on the Plan of an entry."""
PICTURE = FOLDER.parent / "howto" / "report.png"
WIDTH = 1200
"""Width of `PICTURE` in pixels."""


def main() -> None:
    """Write everything in docs/gallery."""
    os.chdir(ROOT)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for folder in ("plans", "verdicts", "repairs"):
        (FOLDER / folder).mkdir(exist_ok=True)
    for entry in ENTRIES:
        print(f"{entry.name}: planning", file=sys.stderr)
        _store(entry)
    for name, text in made_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    if find_spec("playwright") is None:
        print(f"{PICTURE.relative_to(ROOT)} is left as it is, for playwright is not installed", file=sys.stderr)
    else:
        _draw_report(FOLDER / f"{ENTRIES[0].name}.html")


def _draw_report(report: Path) -> None:
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except Error as error:
            reason = error.message.splitlines()[0]
            print(f"{PICTURE.relative_to(ROOT)} is left as it is; no Chromium starts: {reason}", file=sys.stderr)
            return
        tab = browser.new_page(viewport={"width": WIDTH, "height": WIDTH})
        tab.goto(report.as_uri())
        last = tab.locator("#memory .chart").first.bounding_box()
        height = last["y"] + last["height"]
        tab.screenshot(path=PICTURE, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        browser.close()


def _store(entry: Entry) -> None:
    """Plan an entry, and store its Plan with verdicts."""
    config = parse_config(entry.arguments, PlanCommand)
    plans, repair = _review(config) if config.lint is not None else ({OWN: _plan(config)}, None)
    before = Plan.load(str(entry.plan_path)) if entry.plan_path.exists() else None
    plan = plans[OWN]
    is_same = before is not None and _program(before) == _program(plan) and _edits(entry.repair) == _edits(repair)
    _store_verdicts(entry, config, plans, is_same)
    if before is None or _without_duration(before) != _without_duration(plan) or before.details != plan.details:
        plan.save(str(entry.plan_path))
    if repair is not None:
        _write(entry.repair_path, dataclasses.asdict(repair))


def _plan(config: PlanCommand) -> Plan:
    from shardplan.explain.what_if import what_if, with_settings
    from shardplan.search.make_plan import make_plan, model_from_config

    model = model_from_config(config)
    plan = make_plan(config, model)
    return with_settings(plan, what_if(config, model)) if config.what_if else plan


def _review(config: PlanCommand) -> tuple[dict[str, Plan], RepairPanel]:
    """Lint the layout that a configuration names; return it with its repair and the best plan, and the panel of all."""
    from shardplan.lint.repair import review
    from shardplan.report.page.panels.repair import repair_panel

    assert config.lint is not None
    reviewed = review(config.lint, config)
    shown = repair_panel(reviewed)
    assert shown is not None and reviewed.best is not None
    plan, panel = shown
    plans = {OWN: plan, "the best plan": reviewed.best}
    if reviewed.repair is not None and reviewed.repair.lint.plan is not None:
        plans["the smallest edit"] = reviewed.repair.lint.plan
    return plans, panel


def _store_verdicts(entry: Entry, config: PlanCommand, plans: dict[str, Plan], is_same: bool) -> None:
    """Store the verdicts on plans: those that are stored, with the estimates of today, if the programs are the same."""
    path = entry.verdicts_path
    stored = json.loads(path.read_text(encoding="utf-8"))["verdicts"] if is_same and path.exists() else []
    if [(each["label"], each["mesh"]) for each in stored] == [(label, plan.mesh) for label, plan in plans.items()]:
        verdicts = [
            {**each, "estimate": dataclasses.asdict(estimate_of(plan))}
            for each, plan in zip(stored, plans.values(), strict=True)
        ]
    else:
        verdicts = _compile(entry, config, plans)
    _write(path, {"verdicts": verdicts})


def _compile(entry: Entry, config: PlanCommand, plans: dict[str, Plan]) -> list[dict[str, Any]]:
    from shardplan.verify.run import verify
    from shardplan.verify.select_cases import build_case

    print(f"{entry.name}: compiling {', '.join(plans)}", file=sys.stderr)
    cases = [build_case(config, plan, label) for label, plan in plans.items()]
    verdicts = verify(cases, config.compiler)
    return [judgement_json(case.label, case.plan, verdict) for case, verdict in zip(cases, verdicts, strict=True)]


def _program(plan: Plan) -> tuple[Any, ...]:
    """What decides which program a plan stands for."""
    return (
        plan.model, plan.workload, plan.hardware, plan.mesh, plan.compute_mapping, plan.param_mapping, plan.attention,
        plan.experts, plan.compiler_options,
    )  # fmt: skip


def _edits(repair: RepairPanel | None) -> tuple[Any, ...]:
    """What decides which programs the repairs and the best plan stand for, beside that of the layout."""
    return () if repair is None else (repair.section, [each.lines for each in repair.layouts])


def _without_duration(plan: Plan) -> Plan:
    return dataclasses.replace(plan, search=dataclasses.replace(plan.search, seconds=0.0))


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
