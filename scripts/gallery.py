"""What is in docs/gallery: stored Plans and verdicts, and the reports, pictures and page that are made of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from plan_pictures import draw_memory, draw_tokens, draw_torus, templates

from shardplan.plan.mapping import mesh_size
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import decode
from shardplan.report.page.judgement import Judgement, load_judgements, own_judgement
from shardplan.report.page.page import plan_page
from shardplan.report.page.panels.headline import make_headline
from shardplan.report.page.panels.repair import RepairPanel
from shardplan.report.page.units import gib_text, seconds_text

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "gallery"
NO_BREAK_SPACE = "\u00a0"


@dataclass(frozen=True)
class Entry:
    """A report of the gallery."""

    name: str
    """Of its files, without endings."""
    arguments: tuple[str, ...]
    """Of `shardplan plan`, in the root of the repository."""
    draw: Callable[[Plan], str]
    """Draws its picture as SVG."""

    @property
    def command(self) -> str:
        """What a user runs to make such a report, with the compiler's verdict if it is of a plan."""
        words = ("shardplan", "plan", "--report", "plan.html", *self.arguments)
        return " ".join(words if "--lint" in words else (*words, "--verify"))

    @property
    def plan_path(self) -> Path:
        """The file of the Plan that the report shows."""
        return FOLDER / "plans" / f"{self.name}.json"

    @property
    def verdicts_path(self) -> Path:
        """The file of the compiler's verdicts on it, and on what is beside it."""
        return FOLDER / "verdicts" / f"{self.name}.json"

    @property
    def repair_path(self) -> Path:
        """The file of the findings on a hand-written layout; Plans that were searched have none."""
        return FOLDER / "repairs" / f"{self.name}.json"

    @cached_property
    def plan(self) -> Plan:
        """The stored Plan."""
        return Plan.load(str(self.plan_path))

    @cached_property
    def judgements(self) -> list[Judgement]:
        """The stored verdicts."""
        return load_judgements(str(self.verdicts_path))

    @property
    def judgement(self) -> Judgement:
        """The stored verdict on the Plan."""
        judgement = own_judgement(self.plan, self.judgements)
        assert judgement is not None, f"{self.verdicts_path.name} has no verdict on the Plan"
        return judgement

    @property
    def repair(self) -> RepairPanel | None:
        """The stored findings and repairs."""
        if not self.repair_path.exists():
            return None
        return decode(RepairPanel, json.loads(self.repair_path.read_text(encoding="utf-8")))


ENTRIES = (
    Entry("405b-evaluation", ("--config", "configs/405b.yaml", "--what_if"), draw_torus),
    Entry("70b-training", ("--config", "configs/70b-train.yaml"), draw_memory),
    Entry("8b-1m-prompt", ("--config", "configs/8b-1m.yaml"), draw_tokens),
    Entry("mixtral", ("--config", "configs/mixtral-8x7b.yaml"), draw_memory),
    Entry("deepseek-v3", ("--config", "configs/deepseek-v3.yaml"), draw_torus),
    Entry("kimi-k2", ("--config", "configs/kimi-k2.yaml"), draw_memory),
    Entry(
        "failing-layout",
        (
            "--config",
            "configs/405b.yaml",
            "--lint",
            "configs/levanter/405b-heads-mlp.yaml",
        ),
        draw_memory,
    ),
)


def made_files() -> dict[str, str]:
    """File of docs/gallery -> its content, as the code makes it of the stored Plans and verdicts."""
    files = {"index.md": _index()}
    for entry in ENTRIES:
        files[f"{entry.name}.html"] = plan_page(entry.plan, entry.judgements, entry.repair)
        files[f"{entry.name}.svg"] = entry.draw(entry.plan)
    return files


def _index() -> str:
    """The page that leads to the reports, with figures of their Plans and verdicts."""
    markdown = templates().overlay(autoescape=False)
    markdown.filters = {**markdown.filters, "unbroken": lambda text: text.replace(" ", NO_BREAK_SPACE)}
    return markdown.get_template("gallery.md").render(
        entries={entry.name: entry for entry in ENTRIES},
        headlines={entry.name: make_headline(entry.plan, entry.judgement) for entry in ENTRIES},
        shards=_shards,
        transfers=_transfers,
        gib=gib_text,
        seconds=seconds_text,
    )


def _shards(plan: Plan, axis: str) -> int:
    """Number of shards of a logical axis in computations."""
    return mesh_size(plan.mesh, plan.compute_mapping[axis])


def _transfers(plan: Plan, kind: str) -> tuple[float, float]:
    """Seconds of a step in which collectives of one kind run, and those by which they make it longer."""
    assert plan.details is not None
    each = [transfer for task in plan.details.tasks for transfer in task.transfers if transfer.kind == kind]
    return sum(one.seconds for one in each), sum(one.exposed_seconds for one in each)
