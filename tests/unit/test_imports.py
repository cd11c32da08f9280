"""What is imported when: the package is instant, and so is every complaint about a configuration."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module

import jax
import pytest
from conftest import ROOT, run

from shardplan.errors import ConfigError
from shardplan.runtime import private_jax
from shardplan.runtime.deferred_packages import defer_package


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def modules_after_commands(*commands: tuple[str, ...], code: int) -> set[str]:
    """Those that commands have imported, one after the other, when each has ended with the exit code `code`."""
    script = "from shardplan.__main__ import main\n" + "\n".join(
        f"try:\n code = main({command!r}, {argv!r})\nexcept SystemExit as end:\n code = end.code\n"
        f"assert code == {code}, ({command!r}, code)"
        for command, *argv in commands
    )
    return modules_after(script)


def test_no_jax():
    """None of them imports it, or it would be there after all of them."""
    code = """
import shardplan
import shardplan.__main__
import shardplan.config
import shardplan.hardware
from shardplan.catalogue import names
from shardplan.commands import doctor, models, verify
from shardplan.commands.checkpoint import checkpoint, convert
from shardplan.commands.eval import eval
from shardplan.commands.plan import diff, plan
from shardplan.plan import attention_plan, diff, pins, plan
from shardplan.plan.workload import kinds, workload
from shardplan.levanter_config import flat_schema, levanter_file, mesh_section, model_section
from shardplan.levanter_config import section, trainer_section, writer
"""
    assert not {"jax", "haliax", "levanter", "transformers", "rich", "numpy"} & modules_after(code)


@pytest.mark.slow
def test_a_cached_verdict_imports_no_levanter():
    """It would take 3 seconds; the model is built only where the cache does not have what a verdict needs of it."""
    code = "from shardplan.verify import model_facts, read, run, select_cases"
    assert not {"haliax", "levanter", "transformers"} & modules_after(code)


CONFIG = "--config=configs/8b.yaml"
MISTAKES = (
    ("plan", CONFIG, "--hardware.slice=v4-257"),
    ("verify", CONFIG, "--workload.bacth=4"),
    ("plan", CONFIG, "--model.config=llama-3.1-8c"),
    ("checkpoint", "--schedule", "--model=lama"),
    ("plan", "--plan=missing.json"),
    ("plan", CONFIG, "--json=."),
    ("doctor", CONFIG, "--json=."),
    ("models", "lama-3-8b"),
)


def test_help_imports_no_jax():
    assert not {"jax", "haliax", "numpy", "rich"} & modules_after_commands(("plan", "--help"), code=0)


@pytest.mark.slow
def test_mistakes_are_reported_before_jax_is_imported():
    assert not {"jax", "haliax", "transformers"} & modules_after_commands(*MISTAKES, code=2)


@pytest.mark.slow
def test_a_plan_file_is_printed_without_jax(tmp_path):
    path = str(tmp_path / "plan.json")
    done = run("plan", CONFIG, "--json", path)
    assert done.returncode == 0, done.stderr
    modules = modules_after_commands(("plan", "--plan", path), code=0)
    assert not {"jax", "haliax", "transformers"} & modules


@pytest.mark.slow
def test_a_command_imports_no_trainers():
    """`__init__` of Levanter and of datasets would take a fifth of the time of a command."""
    modules = modules_after_commands(("checkpoint", CONFIG, "--schedule"), code=0)
    assert "levanter.models.llama" in modules
    assert not {"levanter.trainer", "levanter.eval_harness", "datasets.arrow_dataset"} & modules


def test_deferred_packages(tmp_path, monkeypatch, raises_message):
    """Submodules are imported without the package's `__init__`, which is executed for the first name of its own."""
    (tmp_path / "deferred").mkdir()
    (tmp_path / "deferred" / "__init__.py").write_text("from deferred.part import NAME\nOTHER = NAME + 1")
    (tmp_path / "deferred" / "part.py").write_text("NAME = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deferred", "deferred.part"):  # forgotten after the test
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    defer_package("deferred")
    defer_package("not_installed")
    package = import_module("deferred")
    assert import_module("deferred.part").NAME == 1
    assert package.part.NAME == 1 and "OTHER" not in vars(package)
    assert package.OTHER == 2 and import_module("deferred") is package
    with raises_message(AttributeError):
        _ = package.nothing
    defer_package("deferred")
    assert import_module("deferred") is package


def test_a_deferred_package_may_put_another_module_in_its_place(tmp_path, monkeypatch, raises_message):
    """As packages of transformers do; a name that was bound to the deferred one has the names of the other."""
    (tmp_path / "outer" / "lazy").mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").write_text("NAME = 1")
    code = "import sys, types\nother = types.ModuleType(__name__)\nother.NAME = 2\nsys.modules[__name__] = other"
    (tmp_path / "outer" / "lazy" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("outer", "outer.lazy"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    defer_package("outer.lazy")
    assert "outer" not in sys.modules
    package = import_module("outer.lazy")
    assert package.NAME == 2 and import_module("outer.lazy").NAME == 2
    with raises_message(AttributeError):
        _ = package.nothing


def test_reports_of_plans_need_no_jax():
    modules = modules_after("import shardplan.report.plan.diff, shardplan.report.plan.tables")
    assert not {"jax", "haliax", "levanter", "transformers"} & modules


def test_private_jax_is_used_in_one_module():
    pattern = re.compile(r"jax\._src|jax\.experimental\.pallas\.ops|\bsplash_attention_kernel\b")
    users = [
        path.stem for path in (ROOT / "shardplan").rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert users == ["private_jax"]


def test_another_jax_is_refused_in_one_line(monkeypatch):
    monkeypatch.delattr(private_jax.splash, "_splash_attention_forward")
    monkeypatch.setattr(private_jax.splash, "_splash_attention_bwd_dq", lambda q, k, bk: None)
    with pytest.raises(ConfigError) as raised:
        private_jax._check()
    assert str(raised.value).startswith(
        f"jax {jax.__version__} does not fit shardplan: splash attention has no _splash_"
    )
    assert "_splash_attention_bwd_dq has other parameters (attn_logits_soft_cap, bk, bkv, " in str(raised.value)
    assert str(raised.value).endswith(f"; install the one that it is tested with ({private_jax.TESTED})")


def test_public_names(raises_message):
    import shardplan

    for name in shardplan.__all__:
        assert getattr(shardplan, name).__module__.startswith("shardplan.")
    assert {*shardplan.__all__} <= {*dir(shardplan)}
    with raises_message(AttributeError):
        _ = shardplan.plan_maker


def test_public_names_of_attention():
    import shardplan.attention

    for name in shardplan.attention.__all__:
        assert getattr(shardplan.attention, name).__module__.startswith("shardplan.")


@pytest.mark.slow
def test_no_two_classes_have_one_name():
    """A name means one thing in the whole package, nested and private classes included."""
    modules = defaultdict(list)
    for path in sorted((ROOT / "shardplan").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(f"{path.relative_to(ROOT)}")
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert not shared
    assert len(modules) > 300  # those that were found
