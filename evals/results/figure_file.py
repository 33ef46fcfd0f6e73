"""Figures on disk."""

import os
from pathlib import Path
from typing import Any

from lowrank_kv_jax.files import replacing


def save_figure(figure: Any, path: str | os.PathLike, dpi: int) -> None:
    """Write a matplotlib figure in the format of the suffix, whole or not at all.

    Raises:
        OSError, ValueError: as `replacing`.
    """
    with replacing(path) as file:
        figure.savefig(file, dpi=dpi, format=Path(path).suffix[1:].lower())
