"""Every notebook is that of its source, runs, and its stored outputs are those of the present code."""

import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner
from make_notebooks import NOTEBOOKS, SOURCES, code_cells, execute, notebook_of, read_source
from processes import fork_python

KERNEL = Path(__file__).with_name("forked_kernel.py")
ABSOLUTE_PATH = re.compile(r"/(work|root|home|Users|tmp)/")
MAX_BYTES = 300_000
ADVICE = "is out of date: run python scripts/make_notebooks.py"

LONG = {"extraction", "long_sequences", "native_sparse_attention", "plan_405b", "repair_levanter"}
"""Notebooks that plan for large slices, or take more than a minute."""
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def stored(source):
    return nbformat.read(notebook_of(source), as_version=4)


def texts(cell):
    """What a code cell printed or returned, as text."""
    return [output.text if output.output_type == "stream" else output.data["text/plain"] for output in cell.outputs]


@pytest.fixture
def forked_kernels(monkeypatch):
    """Kernels are forked from the server of processes: imports are most of what a notebook does."""

    def launch(command, env, cwd, **_):
        return fork_python([KERNEL, *command[command.index("-f") :]], cwd, **env)

    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)


def test_every_notebook_has_a_source():
    assert [notebook_of(source) for source in SOURCES] == sorted(NOTEBOOKS.glob("*.ipynb")) != []


@each_source
def test_cells_are_those_of_the_source(source):
    notebook, expected = stored(source), read_source(source)
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells] == [
        (cell.cell_type, cell.source, cell.metadata) for cell in expected.cells
    ], f"{source.stem} {ADVICE}"


@pytest.mark.parametrize(
    "source",
    [pytest.param(each, marks=[pytest.mark.whole] if each.stem in LONG else [], id=each.stem) for each in SOURCES],
)
def test_outputs_are_those_of_the_code(forked_kernels, source):
    executed, expected = (list(map(texts, code_cells(each))) for each in (execute(read_source(source)), stored(source)))
    assert executed == expected, f"{source.stem} {ADVICE}"


@each_source
def test_stored_outputs_are_of_no_machine(source):
    """No paths, no times of execution, and nothing from stderr, which has progress; in the order of the cells."""
    path, cells = notebook_of(source), code_cells(stored(source))
    assert not ABSOLUTE_PATH.search(path.read_text(encoding="utf-8"))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)
    assert path.stat().st_size < MAX_BYTES
