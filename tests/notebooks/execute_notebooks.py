"""Executes the notebooks in notebooks/ and writes their outputs: python tests/notebooks/execute_notebooks.py"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""Metadata of every notebook, without versions of Python, which differ between machines."""
TIMEOUT_S = 120
"""Longest time for one cell."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs, without stderr, which has progress and times.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
