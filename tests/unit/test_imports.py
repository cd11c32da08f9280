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
        "import shardplan.config",
        "import shardplan.hardware",
        "from shardplan.commands import checkpoint, eval, plan, verify",
        "import shardplan.__main__",
    ],
)
def test_no_jax(code):
    assert not {"jax", "haliax", "levanter", "transformers", "rich"} & modules_after(code)


def test_comparing_plans_needs_no_jax():
    code = "import shardplan.commands.diff, shardplan.plan.diff, shardplan.report.difference"
    assert not {"jax", "haliax", "levanter", "transformers"} & modules_after(code)


def test_public_names():
    import shardplan

    for name in shardplan.__all__:
        assert getattr(shardplan, name).__module__.startswith("shardplan.")
    with pytest.raises(AttributeError, match="module 'shardplan' has no attribute 'plan_maker'"):
        _ = shardplan.plan_maker
