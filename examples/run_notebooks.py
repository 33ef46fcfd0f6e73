"""Runs notebooks in this process, cell by cell, and stores what the cells show.

    uv run python examples/run_notebooks.py examples/*.ipynb
"""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib


def run_cells(cells: Sequence[Mapping[str, Any]], given: Mapping[str, Any] | None = None) -> list[list[dict[str, Any]]]:
    """What each code cell shows, as nbformat 4 stores it: text, the value of its last line, figures.

    Args:
        given: names that are set once the cell tagged "parameters" has run.
    """
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        shown.append(_run("".join(cell["source"]), names, number))
        if cell["metadata"].get("tags") == ["parameters"]:
            names |= given or {}
    return shown


def _run(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree, last, text = ast.parse(source), None, io.StringIO()
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(tree.body.pop().value)
    with contextlib.redirect_stdout(text):
        exec(compile(tree, f"<cell {number}>", "exec"), names)
        value = None if last is None else eval(compile(last, f"<cell {number}>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs + [{"data": data, "metadata": {}, "output_type": "display_data"} for data in _figures()]


def _figures() -> list[dict[str, str]]:
    """Open figures as PNG; they are closed."""
    from matplotlib import pyplot as plt

    found = []
    for figure in map(plt.figure, plt.get_fignums()):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        found.append({"image/png": base64.b64encode(file.getvalue()).decode() + "\n"})
    plt.close("all")
    return found


def main(paths: Sequence[str]) -> None:
    """Run each notebook and store its outputs."""
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, outputs) in enumerate(zip(code, run_cells(notebook["cells"]), strict=True), start=1):
            cell["outputs"], cell["execution_count"] = outputs, number
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"ran {path}: {len(code)} cells")


if __name__ == "__main__":
    main(sys.argv[1:])
