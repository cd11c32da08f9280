"""Every notebook runs, and its stored outputs are those of the present code."""

import re

import nbformat
import pytest
from execute_notebooks import NOTEBOOKS, ROOT, code_cells, execute

from shardplan.model.levanter_compat import IS_MARIN

ABSOLUTE_PATH = re.compile(r"/(work|root|home|Users|tmp)/")


def texts(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return what each code cell printed or returned as text."""
    return [[text_of(output) for output in cell.outputs] for cell in code_cells(notebook)]


def text_of(output: nbformat.NotebookNode) -> str:
    return output.text if output.output_type == "stream" else output.data["text/plain"]


def test_there_are_notebooks():
    assert ROOT / "notebooks" / "first_plan.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs(path):
    stored = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in code_cells(stored)] == [*range(1, len(code_cells(stored)) + 1)]
    executed, expected = texts(execute(path)), texts(stored)
    if not IS_MARIN:  # the stored outputs have the trainer sections of marin-levanter
        executed, expected = (
            [cell for cell in cells if "trainer:" not in "".join(cell)] for cells in (executed, expected)
        )
    assert executed == expected, (
        f"{path.name} is out of date: with marin-levanter, run python tests/notebooks/execute_notebooks.py"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_one_machine(path):
    assert not ABSOLUTE_PATH.search(path.read_text(encoding="utf-8"))
    assert not any(cell.metadata for cell in nbformat.read(path, as_version=4).cells)  # such as times of execution
