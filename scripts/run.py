"""python3 scripts/run.py demo | docs | test

Needs nothing but Python 3.11+ and a package registry. Makes an environment for the Python that runs it, such as
.venv-3.12, with the versions of scripts/constraints*.txt: levanter on Python 3.11, marin-levanter on later ones. Then

  demo   trains a small Llama on the text CPython ships, evaluates it with shardplan on 8 virtual CPU devices, and finds
         the text that it has memorised
  docs   builds the documentation into build/docs, with warnings as errors
  test   runs the linters, the type checker, the import contracts and the tests, and builds package and documentation
"""

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / f".venv-{sys.version_info.major}.{sys.version_info.minor}"
CONSTRAINTS = ROOT / "scripts" / ("constraints-levanter.txt" if sys.version_info < (3, 12) else "constraints-marin.txt")
PACKAGES = ("levanter", "marin-levanter", "haliax", "marin-haliax", "jax", "libtpu", "transformers")
"""Packages whose versions are printed."""

DEMO = (
    ("python", "scripts/make_demo_checkpoint.py", "--output", "build/demo"),
    ("python", "-m", "shardplan.eval", "--config", "configs/tiny.yaml"),
    ("python", "-m", "shardplan.eval", "--config", "configs/tiny-extraction.yaml"),
)
DOCS = (
    ("python", "scripts/make_reference.py", "--check"),
    ("python", "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-j", "auto", "docs", "build/docs"),
)
TEST = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("lint-imports",),
    ("python", "scripts/check_package.py"),
    *DOCS,
    ("pytest", "-n", "3"),  # one more than the two cores that it is meant for: many tests wait for processes
)
COMMANDS = {"demo": DEMO, "docs": DOCS, "test": TEST}


def main() -> int:
    """Install if necessary, then run the steps; returns the exit code of the first that fails."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whatever Python the user has runs this file
        print(f"scripts/run.py: needs Python 3.11 or newer, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    if len(sys.argv) != 2 or sys.argv[1] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    started = time.monotonic()
    install()
    print(f"+ {describe_environment()}", flush=True)
    binaries = ENVIRONMENT / "bin"
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    for step in COMMANDS[sys.argv[1]]:
        print(f"+ {' '.join(step)}", flush=True)
        code = subprocess.run([str(binaries / step[0]), *step[1:]], cwd=ROOT, env=environment).returncode
        if code != 0:
            print(f"scripts/run.py: {' '.join(step)} failed with exit code {code}", file=sys.stderr)
            return code
    print(f"{sys.argv[1]}: success in {time.monotonic() - started:.0f} s, with {describe_environment()}", flush=True)
    return 0


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
