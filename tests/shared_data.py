"""Data that lies beside a checkout but not in it: tests that need it skip where it is absent."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "data"


def shared(*parts: str) -> Path:
    """The path of shared data, or a skipped test."""
    path = FOLDER.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {Path('..', 'shared', 'data', *parts)} beside the checkout")
    return path
