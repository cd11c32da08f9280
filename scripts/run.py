"""python3 scripts/run.py demo | docs | checks | test

Needs a Python >= 3.12 and a package registry. An older python3 that runs it looks for a newer one on PATH, in pyenv and
in uv, and says which it takes. Makes an environment for that Python, such as .venv-3.12, with the versions of
scripts/constraints.txt. Then

  demo   trains a small Llama on the text CPython ships, evaluates it with shardplan on 8 virtual CPU devices, and finds
         the text that it has memorised; then trains another one with shardplan, stops it, and goes on
  docs   builds the documentation into build/docs, with warnings as errors
  checks runs the linters, the type checker and the import contracts, and builds package and documentation
  test   runs the tests, and the checks beside them
"""

from __future__ import annotations  # an older Python reads this file as well

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / f".venv-{sys.version_info.major}.{sys.version_info.minor}"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
OLDEST_PYTHON = (3, 12)
NEW_PYTHONS = ("3.12", "3.13", "3.14")
"""Versions that are looked for, in this order: the one that most tests are run with first."""
PACKAGES = ("marin-levanter", "marin-haliax", "jax", "libtpu", "transformers")
"""Packages whose versions are printed."""

DEMO = (
    ("python", "scripts/make_demo_checkpoint.py", "--output", "build/demo"),
    ("python", "-m", "shardplan.eval", "--config", "configs/tiny.yaml"),
    ("python", "-m", "shardplan.eval", "--config", "configs/tiny-extraction.yaml"),
    ("python", "scripts/train_demo.py"),
)
DOCS = (
    ("python", "scripts/make_reference.py", "--check"),
    ("python", "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-j", "auto", "docs", "build/docs"),
)
CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports",),
    ("python", "scripts/check_package.py"),
    *DOCS,
)
TEST = (("pytest", "-n", "3"),)  # one more than the two cores that it is meant for: many tests wait for processes
COMMANDS = {"demo": DEMO, "docs": DOCS, "checks": CHECKS, "test": TEST}


def main() -> int:
    """Install if necessary, then run the steps; returns the exit code of the first that fails."""
    if sys.version_info < OLDEST_PYTHON:
        return run_with_newer_python()
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    started = time.monotonic()
    install()
    print(f"+ {describe_environment()}", flush=True)
    code = run_with_checks() if sys.argv[1] == "test" else run_steps(sys.argv[1])
    if code == 0:
        seconds = time.monotonic() - started
        print(f"{sys.argv[1]}: success in {seconds:.0f} s, with {describe_environment()}", flush=True)
    return code


def run_with_checks() -> int:
    """Run the tests, and beside them the checks, which use one core; returns an exit code other than 0 if one has it.

    What the checks print comes after what the tests print.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        command = [sys.executable, __file__, "checks"]
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as checks:
            code = run_steps("test")
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout)
    return code or checks.returncode


def run_steps(command: str) -> int:
    """Run the steps of a command; returns the exit code of the first that fails."""
    binaries = ENVIRONMENT / "bin"
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    # or every process that a test starts would compile the package anew
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for step in COMMANDS[command]:
        print(f"+ {' '.join(step)}", flush=True)
        code = subprocess.run([str(binaries / step[0]), *step[1:]], cwd=ROOT, env=environment).returncode
        if code != 0:
            print(f"scripts/run.py: {' '.join(step)} failed with exit code {code}", file=sys.stderr, flush=True)
            return code
    return 0


def run_with_newer_python() -> int:
    """Run this script with a Python that is new enough, in place of this process; returns an exit code if none is."""
    version = sys.version.split()[0]
    for python in candidates():
        if is_new_enough(python):
            print(f"scripts/run.py: this is Python {version}; taking {python}", flush=True)
            os.execv(python, [python, __file__, *sys.argv[1:]])
    print(
        f"scripts/run.py: needs Python 3.12 or newer, this is {version}, and PATH, pyenv and uv have none; get one "
        "with `uv python install 3.12` or `pyenv install 3.12`",
        file=sys.stderr,
    )
    return 2


def candidates() -> Iterator[str]:
    """Yield the paths of Pythons on PATH, in pyenv and in uv, which need not be new enough or work."""
    for version in NEW_PYTHONS:
        found = shutil.which(f"python{version}")
        if found:
            yield found
    versions = Path(os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))) / "versions"
    for version in NEW_PYTHONS:
        yield from sorted(map(str, versions.glob(f"{version}.*/bin/python3")), reverse=True)
    uv = shutil.which("uv")
    if uv:
        command = [uv, "python", "find", "--no-python-downloads", ">=3.12"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if found:
            yield found


def is_new_enough(python: str) -> bool:
    """Whether `python` runs, and is new enough; a shim of pyenv for a version that is not installed does not run."""
    code = f"import sys, venv; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def install() -> None:
    """Make the environment, unless it is there and made from the same requirements."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    stamp = ENVIRONMENT / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"+ making {ENVIRONMENT.name} (a few minutes: JAX, Levanter and what they need)", flush=True)
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--no-input"]
    subprocess.run([*pip, "--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[test,verify,docs]"], check=True)
    stamp.write_text(wanted)


def describe_environment() -> str:
    """The version of Python, and those of `PACKAGES` that the environment has."""
    code = (
        "from importlib.metadata import distributions as d; "
        f"print(*sorted({{x.name + ' ' + x.version for x in d() if x.name in {PACKAGES}}}), sep=', ')"
    )
    python = str(ENVIRONMENT / "bin" / "python")
    packages = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return f"Python {sys.version.split()[0]}, {packages}"


if __name__ == "__main__":
    raise SystemExit(main())
