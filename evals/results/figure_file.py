"""Figures, drawn without a display, and on disk."""

import os
from pathlib import Path
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.files import check_regular, expanded, replacing

FORMATS = {
    ".png": (b"\x89PNG\r\n\x1a\n",), ".jpg": (b"\xff\xd8",), ".jpeg": (b"\xff\xd8",), ".webp": (b"RIFF",),
    ".tif": (b"II*\0", b"MM\0*"), ".tiff": (b"II*\0", b"MM\0*"), ".pdf": (b"%PDF",), ".svg": (b"<?xml", b"<svg"),
    ".eps": (b"%!PS",),
}
"""Suffixes of what matplotlib draws without a display and without LaTeX, and how such files begin."""


def pyplot() -> Any:
    """Matplotlib's pyplot, drawn by Agg.

    Raises:
        ValueError: it is not installed.
    """
    check_extra("matplotlib", "a figure")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def new_figure(**options: Any) -> Any:
    """An empty `matplotlib.figure.Figure`, of which pyplot knows nothing.

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_extra("matplotlib", "a figure")
    from matplotlib.figure import Figure

    return Figure(**options)


def check_figure(path: str | os.PathLike) -> None:
    """Raise ValueError where a file is there that is no figure of its suffix's format, and so somebody's: it is not
    replaced."""
    check_regular(path)
    target = expanded(path)
    if not target.exists():
        return
    with open(target, "rb") as file:
        begin = file.read(8)
    suffix = target.suffix.lower()
    if begin and not begin.startswith(FORMATS.get(suffix, b"")):
        raise ValueError(f"{os.fspath(path)}: is there and no {suffix[1:].upper()} file; give another name")


def save_figure(figure: Any, path: str | os.PathLike, dpi: int) -> None:
    """Write a matplotlib figure in the format of the suffix, whole or not at all.

    Raises:
        OSError, ValueError: as `replacing` and `check_figure`.
    """
    check_figure(path)
    with replacing(path) as file:
        figure.savefig(file, dpi=dpi, format=Path(path).suffix[1:].lower())
