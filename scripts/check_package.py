"""python scripts/check_package.py

Builds sdist and wheel into build/dist, has twine check them, and checks that the wheel has every file of the package,
and that a plan and a script for a launcher come out of it once it is installed. Dependencies are the environment's.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
DIST, INSTALLED = BUILD / "dist", BUILD / "installed"
COMMANDS = (
    ("plan", "--model", "llama-3.1-8b", "--hardware.slice", "v5e-8"),
    ("launch", "--model.ref", "gs://bucket/model", "--model.config", "llama-3.1-8b", "--hardware.slice", "v5e-8",
     "--data.path", "gs://bucket/texts", "--to", "slurm"),
)  # fmt: skip
"""They read the configurations of models, the factors of the cost model, and templates."""


def main() -> int:
    """Build and check; returns the exit code."""
    for folder in (DIST, INSTALLED):
        shutil.rmtree(folder, ignore_errors=True)
    run("build", "--outdir", str(DIST), str(ROOT))
    run("twine", "check", "--strict", *map(str, DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    difference = files_of_the_package() ^ files_of_the_wheel(wheel)
    if difference:
        print(f"in the package or in the wheel alone: {', '.join(sorted(difference))}", file=sys.stderr)
        return 1
    run("pip", "install", "--quiet", "--no-deps", "--target", str(INSTALLED), str(wheel))
    for command in COMMANDS:
        run("shardplan", *command, cwd=INSTALLED, PYTHONPATH=str(INSTALLED))
    print(f"{wheel.name}: complete, and works from {INSTALLED.relative_to(ROOT)}")
    return 0


def files_of_the_package() -> set[str]:
    """Every file of the folder shardplan, by its path from the root."""
    paths = (path for path in (ROOT / "shardplan").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def files_of_the_wheel(wheel: Path) -> set[str]:
    """The files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def run(module: str, *arguments: str, cwd: Path = ROOT, **variables: str) -> None:
    """Run a module, quietly unless it fails.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\npython -m {module} {' '.join(arguments)}: exit code {done.returncode}")


if __name__ == "__main__":
    raise SystemExit(main())
