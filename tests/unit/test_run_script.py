"""scripts/run.py looks for a Python that is new enough where an older one runs it."""

import sys
from pathlib import Path

import pytest
import run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only folder on PATH, with no pyenv and no uv."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def write_shim(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("place", ["python3.13", "pyenv/versions/3.13.1/bin/python3"])
def test_a_newer_python_is_taken(folder, monkeypatch, capsys, place):
    """Of several the first one that runs is taken; a shim of a version that is not installed does not run."""
    write_shim(folder / "python3.12", 127)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).symlink_to(sys.executable)
    taken = []
    monkeypatch.setattr(run.os, "execv", lambda python, arguments: taken.append((python, arguments)))
    monkeypatch.setattr(run.sys, "argv", ["run.py", "test"])
    run.run_with_newer_python()
    assert taken == [(str(folder / place), [str(folder / place), run.__file__, "test"])]
    assert f"taking {folder / place}" in capsys.readouterr().out


def test_no_newer_python(folder, capsys):
    write_shim(folder / "python3.12", 1)
    assert run.run_with_newer_python() == 2
    assert "needs Python 3.12 or newer" in capsys.readouterr().err.splitlines()[0]


def test_the_oldest_python_is_that_of_the_package():
    required = (Path(run.ROOT) / "pyproject.toml").read_text().split('requires-python = ">=')[1].split('"')[0]
    assert tuple(map(int, required.split("."))) == run.OLDEST_PYTHON
