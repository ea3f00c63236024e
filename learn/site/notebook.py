"""Runs the code cells of a notebook in order, without Jupyter.

python -m llamaspec.learn.site.notebook docs/first-steps.ipynb    runs it, and writes its output into it
"""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def printed(notebook: dict[str, Any]) -> list[str]:
    """Run the code cells in one namespace, and return the output of each cell.

    Raises the exception of a cell that fails.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(notebook), 1):
        with redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
        outputs.append(out.getvalue())
    return outputs


def stored_outputs(notebook: dict[str, Any]) -> list[str]:
    """Return the output of each code cell that is stored in the notebook."""
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that contain code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def read(path: Path) -> dict[str, Any]:
    """Read a notebook of format 4."""
    return json.loads(path.read_text(encoding="utf-8"))


def main(path: Path) -> None:
    """Run a notebook, and store the output of its cells in its file."""
    notebook = read(path)
    for count, (cell, text) in enumerate(zip(code_cells(notebook), printed(notebook), strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": count, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
