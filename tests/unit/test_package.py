"""What pyproject.toml says of the package; `scripts/check_package.py` builds it, and runs it from the wheel."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DATA = PYPROJECT["tool"]["setuptools"]["package-data"]


def test_every_file_that_is_no_module_is_package_data():
    """Otherwise a clone has it, and a wheel has not."""
    included = {
        path
        for package, patterns in PACKAGE_DATA.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {path for path in (ROOT / "shardplan").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} == included


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for path in (ROOT / "shardplan").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_extras_are_documented():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == set(
        PYPROJECT["project"]["optional-dependencies"]
    )
