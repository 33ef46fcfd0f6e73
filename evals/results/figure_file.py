"""Figures, drawn without a display, and on disk."""

import os
from pathlib import Path
from typing import Any

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.files import replacing


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


def save_figure(figure: Any, path: str | os.PathLike, dpi: int) -> None:
    """Write a matplotlib figure in the format of the suffix, whole or not at all.

    Raises:
        OSError, ValueError: as `replacing`.
    """
    with replacing(path) as file:
        figure.savefig(file, dpi=dpi, format=Path(path).suffix[1:].lower())
