"""python scripts/make_notebooks.py [NAME ...]

Make the notebooks from their sources, execute them, and store them with their outputs; all of them unless some are
named. A source, notebooks/sources/NAME.py, is a script whose cells begin with `# %%` (jupytext's py:percent), and
becomes notebooks/NAME.ipynb.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted((NOTEBOOKS / "sources").glob("*.py"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""Metadata of every notebook, without versions of Python, which differ between machines."""
TIMEOUT_S = 600
"""Longest time for one cell, on a machine that does much else."""


def main() -> None:
    """Make the notebooks of the command line."""
    named = {f"{name}.py" for name in sys.argv[1:]}
    unknown = named - {source.name for source in SOURCES}
    if unknown:
        sys.exit(f"no source {', '.join(sorted(unknown))} in notebooks/sources")
    for source in SOURCES:
        if not named or source.name in named:
            started = time.monotonic()
            target = notebook_of(source)
            nbformat.write(execute(read_source(source)), target)
            print(
                f"{target.name}: {time.monotonic() - started:.1f} s, {target.stat().st_size / 1000:.0f} kB", flush=True
            )


def notebook_of(source: Path) -> Path:
    """Return the path of the notebook that is made from a source."""
    return NOTEBOOKS / f"{source.stem}.ipynb"


def read_source(source: Path) -> nbformat.NotebookNode:
    """Return the notebook of a source, without outputs."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.metadata, notebook.nbformat_minor = nbformat.from_dict(METADATA), 5
    for number, cell in enumerate(notebook.cells):
        cell.id = str(number)
        cell.metadata = nbformat.from_dict({"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {})
    return notebook


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook with its outputs, without stderr, which has progress and times.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    client.execute()
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


if __name__ == "__main__":
    main()
