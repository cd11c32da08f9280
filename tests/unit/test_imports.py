"""What is imported when: the package is instant, and so is every complaint about a configuration."""

import subprocess
import sys

import pytest


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize(
    "code",
    [
        "import shardplan",
        "import shardplan.__main__",
        "import shardplan.config",
        "import shardplan.hardware",
        "from shardplan.commands import checkpoint, convert, diff, eval, plan, verify",
        "from shardplan.plan import attention_plan, compiler_options, diff, mesh_axes, pins, plan, workload",
        "from shardplan.levanter_config import flat_schema, levanter_file, mesh_schema, model_section",
        "from shardplan.levanter_config import schema, section, trainer_section, writer",
    ],
)
def test_no_jax(code):
    assert not {"jax", "haliax", "levanter", "transformers", "rich"} & modules_after(code)


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
