"""`shardplan doctor`: installed versions, and packages that cannot be imported."""

import sys
from pathlib import Path

from doctor_checks import findings, problem

from shardplan.doctor.checks import imports, versions
from shardplan.doctor.findings import Level
from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES
from shardplan.runtime import private_jax


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write the metadata of a package, as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]))


def test_installed_versions_fit():
    (found,) = findings(versions)
    assert found.level is Level.OK, found
    for name in ("Python 3.", "jax 0.", "jaxlib 0.", "libtpu 0.0.", "transformers ", *LEVANTER_PACKAGES):
        assert name in found.measured


def test_another_jaxlib(tmp_path, monkeypatch):
    """It is outside of the range of shardplan, and of that of the installed JAX."""
    install(tmp_path, "jaxlib", "0.4.30")
    monkeypatch.syspath_prepend(tmp_path)
    own, of_jax = findings(versions)
    assert own.level is of_jax.level is Level.ERROR
    assert own.measured == of_jax.measured == "jaxlib 0.4.30"
    assert own.required.startswith("jaxlib<0.1") and own.required.endswith(", by shardplan 0.1.0")
    assert ", by jax 0.1" in of_jax.required and of_jax.remedy.startswith("pip install 'jaxlib")


def test_a_jaxlib_that_only_jax_refuses(tmp_path, monkeypatch):
    install(tmp_path, "jaxlib", "0.11.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert ", by jax 0.1" in problem(versions).required


def test_a_libtpu_for_another_jax(tmp_path, monkeypatch):
    install(tmp_path, "libtpu", "0.0.30")
    monkeypatch.syspath_prepend(tmp_path)
    assert [finding.required.rpartition(", by ")[2].split()[0] for finding in findings(versions)] == [
        "shardplan",
        "jax",
    ]


def test_another_transformers(tmp_path, monkeypatch):
    """Its range is Levanter's."""
    install(tmp_path, "transformers", "3.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(versions)
    assert found.measured == "transformers 3.0" and f", by {LEVANTER_PACKAGES[1]} " in found.required


def test_another_python(tmp_path, monkeypatch):
    install(tmp_path, "shardplan", "0.1.0", "Requires-Python: <3.10")
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(versions)
    assert (found.level, found.required) == (Level.ERROR, "Python <3.10")


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    install(
        tmp_path,
        "shardplan",
        "0.1.0",
        "Requires-Python: >=3.12",
        "Requires-Dist: not-there>=2",
        "Requires-Dist: libtpu-x; extra == 'test'",
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(versions)
    assert (found.measured, found.remedy) == ("not-there is not installed", "pip install 'not-there>=2'")


def test_both_levanters(tmp_path, monkeypatch):
    install(tmp_path, "levanter", "9.9")
    monkeypatch.syspath_prepend(tmp_path)
    found = problem(versions)
    assert "are both installed" in found.measured and found.remedy.startswith("pip uninstall levanter marin-levanter")


def test_a_private_function_that_jax_no_longer_has(monkeypatch):
    monkeypatch.delattr(private_jax.splash, "_splash_attention_forward")
    monkeypatch.delitem(sys.modules, "shardplan.runtime.private_jax")
    found = problem(imports)
    assert (
        found.measured.startswith("jax 0.1") and "splash attention has no _splash_attention_forward" in found.measured
    )


def test_a_levanter_that_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "levanter.models.lm_model", None)
    found = problem(imports)
    assert found.measured.startswith("levanter.models.lm_model cannot be imported: ModuleNotFoundError: import of")
