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


@pytest.mark.parametrize("target", COMPILERS)
def test_every_program_compiles(target):
    python = os.environ.get("LOWRANK_KV_COMPILER_PYTHON", sys.executable)
    if python == sys.executable:  # the answer without starting a process for it
        try:
            version(COMPILERS[target])
        except PackageNotFoundError:
            pytest.skip(f"no compiler for {target}: {COMPILERS[target]} is not installed, see the extra kernel-compilers")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM, target], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout[done.stdout.index('{"results"') :])
    if said["missing"]:
        pytest.skip(said["missing"][target])
    assert said["results"]
    assert not [(r["name"], r["failure"]) for r in said["results"] if r["failure"]]
    if target == "sm_90":
        assert not [r["name"] for r in said["results"] if r["spilled"] and not r["name"].startswith(SPILLS)]
        assert not [r["name"] for r in said["results"] if r["shared"] > 227 * 1024]
        tensor_cores = [{"mma", "wgmma"} & set(r["instructions"]) for r in said["results"] if "float32" not in r["name"]]
        assert all(tensor_cores)
    else:  # no buffer of tokens is copied into another layout
        assert not [r["name"] for r in said["results"] if r["temporaries"] > 1 << 20]
