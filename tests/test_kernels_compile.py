"""The kernels compile for hardware that is not there; in a process of their own, where the compilers can be had.

`LOWRANK_KV_COMPILER_PYTHON` names an interpreter whose environment has the extra `kernel-compilers`.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import json, sys
from lowrank_kv_jax.pallas_kernels.compile_grid import compile_all
results, missing = compile_all(sys.argv[1:])
rows = [{"name": r.name, "failure": r.failure, **r.facts} for r in results]
json.dump({"results": rows, "missing": missing}, sys.stdout)
"""


SPILLS = "pre-RoPE 512/512, joint"  # 1.2 KiB with the Triton of jax 0.12, nothing with that of 0.10
COMPILERS = {"sm_90": "jax-cuda13-plugin", "v5e": "libtpu", "v6e": "libtpu"}


WHOLE = """
import json, sys
from lowrank_kv_jax.pallas_kernels.compile_whole import compile_whole
results, missing = compile_whole(sys.argv[1:])
json.dump({"results": [{"failure": r.failure, **r.facts} for r in results], "missing": missing}, sys.stdout)
"""


def compiled(program, target):
    """What a process with the compilers says of a target; skips where there is none."""
    python = os.environ.get("LOWRANK_KV_COMPILER_PYTHON", sys.executable)
    if python == sys.executable:  # the answer without starting a process for it
        try:
            version(COMPILERS[target])
        except PackageNotFoundError:
            pytest.skip(f"no compiler for {target}: {COMPILERS[target]} is not installed, see the extra kernel-compilers")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, target], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout[done.stdout.index('{"results"') :])
    if said["missing"]:
        pytest.skip(said["missing"][target])
    assert said["results"]
    return said["results"]


@pytest.mark.parametrize("target", COMPILERS)
def test_every_program_compiles(target):
    results = compiled(PROGRAM, target)
    assert not [(r["name"], r["failure"]) for r in results if r["failure"]]
    if target == "sm_90":
        assert not [r["name"] for r in results if r["spilled"] and not r["name"].startswith(SPILLS)]
        assert not [r["name"] for r in results if r["shared"] > 227 * 1024]
        tensor_cores = [{"mma", "wgmma"} & set(r["instructions"]) for r in results if "float32" not in r["name"]]
        assert all(tensor_cores)
    else:  # no buffer of tokens is copied into another layout
        assert not [r["name"] for r in results if r["temporaries"] > 1 << 20]


@pytest.mark.parametrize("target", ["sm_90", "v5e"])
def test_a_long_prompt_is_read_within_three_gigabytes(target):
    """Logits of every pair of 32K tokens would take 137 GB. Most of what is left is the MLP's."""
    (result,) = compiled(WHOLE, target)
    assert result["failure"] is None and result["temporaries"] <= 3e9
