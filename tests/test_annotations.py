"""Shapes in signatures are true: every function that says some is called under a type checker, which `.ci/run` does."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_shapes_in_signatures_are_true():
    pytest.importorskip("beartype")
    done = subprocess.run([sys.executable, HERE / "annotations.py"], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
