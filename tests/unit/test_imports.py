"""What is imported when: the package is instant, and so is every complaint about a configuration."""

import subprocess
import sys

import pytest
from conftest import ROOT, run


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def modules_after_command(command: str, *argv: str, code: int) -> set[str]:
    """Those that a command has imported when it ends with the exit code `code`."""
    lines = [
        "from shardplan.__main__ import main",
        f"try:\n code = main({command!r}, {argv!r})\nexcept SystemExit as end:\n code = end.code",
        f"assert code == {code}, code",
    ]
    return modules_after("\n".join(lines))


@pytest.mark.parametrize(
    "code",
    [
        "import shardplan",
        "import shardplan.__main__",
        "import shardplan.config",
        "import shardplan.hardware",
        "from shardplan.commands import checkpoint, convert, diff, eval, plan, verify",
        "from shardplan.plan import attention_plan, diff, mesh_axes, pins, plan, workload",
        "from shardplan.levanter_config import flat_schema, levanter_file, mesh_schema, model_section",
        "from shardplan.levanter_config import schema, section, trainer_section, writer",
    ],
)
def test_no_jax(code):
    assert not {"jax", "haliax", "levanter", "transformers", "rich", "numpy"} & modules_after(code)


def test_a_cached_verdict_imports_no_levanter():
    """It would take 3 seconds; the model is built only where the cache does not have what a verdict needs of it."""
    code = "from shardplan.verify import model_facts, read, run, select_cases"
    assert not {"haliax", "levanter", "transformers"} & modules_after(code)


CONFIG = "--config=configs/8b.yaml"
MISTAKES = {
    "slice": ("plan", CONFIG, "--hardware.slice=v4-257"),
    "key": ("verify", CONFIG, "--workload.bacth=4"),
    "config.json": ("plan", CONFIG, "--model.config=llama-3.1-8c"),
    "checkpoint": ("checkpoint", "--schedule", "--model=lama"),
    "plan": ("plan", "--plan=missing.json"),
    "json": ("plan", CONFIG, "--json=."),
}


def test_help_imports_no_jax():
    assert not {"jax", "levanter", "numpy", "rich"} & modules_after_command("plan", "--help", code=0)


@pytest.mark.parametrize("argv", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_before_jax_is_imported(argv):
    assert not {"jax", "levanter", "transformers"} & modules_after_command(*argv, code=2)


def test_a_plan_file_is_printed_without_jax(tmp_path):
    path = str(tmp_path / "plan.json")
    done = run("plan", CONFIG, "--json", path)
    assert done.returncode == 0, done.stderr
    modules = modules_after_command("plan", "--plan", path, code=0)
    assert not {"jax", "haliax", "levanter", "transformers"} & modules


def test_reports_of_plans_need_no_jax():
    modules = modules_after("import shardplan.report.diff, shardplan.report.tables")
    assert not {"jax", "haliax", "levanter", "transformers"} & modules


def test_public_names():
    import shardplan

    for name in shardplan.__all__:
        assert getattr(shardplan, name).__module__.startswith("shardplan.")
    assert {*shardplan.__all__} <= {*dir(shardplan)}
    with pytest.raises(AttributeError, match="module 'shardplan' has no attribute 'plan_maker'"):
        _ = shardplan.plan_maker


def test_public_names_of_attention():
    import shardplan.attention

    for name in shardplan.attention.__all__:
        assert getattr(shardplan.attention, name).__module__.startswith("shardplan.")
