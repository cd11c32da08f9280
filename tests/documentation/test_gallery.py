"""docs/gallery is what the code makes of the stored Plans and verdicts, and the Plans are what the planner makes."""

import json
import re

import gallery
import make_gallery
import pytest
from gallery import ENTRIES, FOLDER, made_files

from shardplan.config import parse_config
from shardplan.config.command_flags import PlanCommand
from shardplan.search.make_plan import make_plan

MADE = ["index.md", *(f"{entry.name}.{ending}" for entry in ENTRIES for ending in ("html", "svg"))]
MAX_BYTES, MAX_BYTES_OF_ALL = 1_000_000, 3_000_000


@pytest.fixture(scope="module")
def made():
    return made_files()


def text_of(name):
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", MADE)
def test_it_is_as_the_code_has_it(made, name):
    is_same = text_of(name) == made[name]  # a difference of two pages is of no use, and takes pytest minutes
    assert is_same, "run python scripts/make_gallery.py"


def test_nothing_is_left_over():
    stored = {entry.plan_path for entry in ENTRIES} | {entry.verdicts_path for entry in ENTRIES}
    stored |= {entry.repair_path for entry in ENTRIES if entry.repair is not None}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == stored | {FOLDER / name for name in MADE}


def test_pages_are_small_and_need_nothing_else():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < MAX_BYTES_OF_ALL
    for name in MADE[1:]:
        text = text_of(name).replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert len(text) < MAX_BYTES, name
        assert not re.search(r"(?:src|href)=[\"']?[^#\"']|url\(|@import|https?://", text), name
        assert not re.search(r"/(?:home|root|tmp|work|usr)/", text), name


def test_the_page_links_every_report():
    linked = re.findall(r'<a href="([^"]+)">', text_of("index.md"))
    assert linked == [f"{entry.name}.html" for entry in ENTRIES]


@pytest.mark.slow
def test_an_entry_with_other_settings_is_planned():
    arguments = [
        "--model.config=llama-3.1-8b",
        "--hardware.slice=cpu-1",
        "--workload.batch=1",
        "--workload.position=64",
    ]
    plan = make_gallery._plan(parse_config([*arguments, "--what_if"], PlanCommand))
    assert "workload.batch 2" in [each.change for each in plan.details.settings]


def test_repairs_are_read_after_they_are_stored(tmp_path, monkeypatch):
    """Not those of the file before, with which they were compared."""
    entry = next(each for each in ENTRIES if each.repair is not None)
    values = json.loads(entry.repair_path.read_text())
    monkeypatch.setattr(gallery, "FOLDER", tmp_path)
    (tmp_path / "repairs").mkdir()
    for path in ("before.yaml", "after.yaml"):
        entry.repair_path.write_text(json.dumps({**values, "path": path}))
        assert entry.repair.path == path


@pytest.mark.slow
def test_a_stored_plan_is_what_the_planner_makes():
    """The one that is planned in the shortest time."""
    entry = next(entry for entry in ENTRIES if entry.name == "mixtral")
    plan = make_plan(parse_config(entry.arguments, PlanCommand))
    for part in ("model", "workload", "hardware", "mesh", "compute_mapping", "param_mapping", "attention"):
        assert getattr(plan, part) == getattr(entry.plan, part), f"{part}: run python scripts/make_gallery.py"
    assert plan.cost.step_seconds == pytest.approx(entry.plan.cost.step_seconds, rel=1e-3)
    assert plan.memory.peak == pytest.approx(entry.plan.memory.peak, rel=1e-3)
