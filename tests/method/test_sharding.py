"""A cache on a mesh of 8 devices is the cache on one, and no collective moves it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from helpers import PLAIN

from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.storage.sharding import check_mesh, make_mesh

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("sharding")  # one worker: all read the results of one process


# Simulated devices are slow: most methods are run by hand with -m slow.
QUICK = ("full", "ojakv", "triton:palu:rank=0.5,sinks=4,recent=8")  # the last by kernels, from coefficients that heads share
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(REGISTRY)]
CASES.append(pytest.param("kivi:bits=8+kvzip:keep=0.5", marks=pytest.mark.slow))  # quantised heads in one buffer
CASES.append(pytest.param("transform:heads=per_head,steps=prompt,sinks=4,recent=8", marks=pytest.mark.slow))
CASES.append(pytest.param("transform:bits=3,rope=tile,sinks=4,recent=8", marks=pytest.mark.slow))
CASES.append(pytest.param("transform:heads=per_head,kv=joint,sinks=4,recent=8", marks=pytest.mark.slow))
for codec in ("ojakv", "palu", "xkv"):
    CASES.append(pytest.param(f"{codec}:bits=2.5,sinks=4,recent=8", marks=pytest.mark.slow))


@functools.cache
def results(*names, **environment):
    """Of each method, by a process with 8 devices; the device count cannot change after JAX has started."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64", "PYTHONPATH": str(HERE.parent)}
    env |= environment
    done = subprocess.run(
        [sys.executable, str(HERE / "sharded_methods.py"), *names], env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {record["method"]: record for record in map(json.loads, done.stdout.splitlines())}


def record_of(name):
    return results(*(QUICK if name in QUICK else (name,)))[name]


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(name):
    record = record_of(name)
    assert record["difference"] < 1e-4 and record["same_tokens"]
    assert record["over_data"] and record["over_model"]


@pytest.mark.parametrize("name", CASES)
def test_no_collective_moves_the_cache(name):
    """Activations of a token and coefficients of a block may travel; nothing with the capacity among its axes may."""
    record = record_of(name)
    assert record["largest_collective"] < record["capacity"] * PLAIN.head_dim


MORE = tuple(f"triton:{spec}" for spec in (
    "full", "ojakv:rank=0.5,sinks=4,recent=8,heads=joint", "ojakv:rank=0.5,rope=pre,sinks=4,recent=8", "minicache", "adakv",
    "osp:rank=0.5,sinks=4,recent=8", "osp:rank=0.5,heads=joint,sinks=4,recent=8", "snapkv:keep=0.5,sinks=4,recent=8",
    "ojakv:bits=8,rank=0.5,sinks=4,recent=8", "transform:bits=3,sampled=False,sinks=4,recent=8",
    "transform:bits=3,heads=per_head,sampled=False,sinks=4,recent=8+snapkv:keep=0.5",
    "transform:bits=3,kv=joint,sampled=False,sinks=4,recent=8", "streamingllm:budget=32,sinks=4", "kivi:bits=4,recent=8"))


@pytest.mark.parametrize("names", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["quick", "more"])
def test_kernels_read_what_lies_on_their_device(names):
    """Interpreted, they answer as on one device; the compiler would gather all tokens for them."""
    for record in (record for name, record in results(*names).items() if name.startswith("triton:")):
        assert record["same_tokens"] and record["largest_collective"] < record["capacity"] * PLAIN.head_dim


@pytest.mark.slow
def test_heads_with_budgets_of_their_own_are_read_by_kernels_too():
    """Each device has all of their tokens and reads those of its heads; that XLA does it instead would be an error."""
    names = ("adakv", "momentkv:keep=0.5,sinks=4,recent=8", "kvzip:keep=0.5,sinks=4,recent=8",
             "kivi:bits=4,recent=8+kvzip:keep=0.5", "static-pca-h:rank=0.5,sinks=4,recent=8+adakv:keep=0.5,recent=8")
    environment = {"LOWRANK_KV_BACKEND": "triton", "PYTHONWARNINGS": "error::RuntimeWarning"}
    for record in results.__wrapped__(*names, **environment).values():
        assert record["difference"] < 1e-4 and record["same_tokens"]
        assert record["largest_collective"] < record["capacity"] * PLAIN.head_dim


ROWS = """
import jax, jax.numpy as jnp
from helpers import PLAIN, model, prompts
from lowrank_kv_jax.generation.generate import decode_block, generate
from lowrank_kv_jax.method.cache import take_rows
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.storage.sharding import make_mesh
mesh, texts, plain = make_mesh("data=2"), prompts(4, 40).tolist(), model(PLAIN)
one = type(plain)(PLAIN, jax.device_put(plain.params, param_shardings(PLAIN, mesh)))
try:
    generate(type(plain)(PLAIN, jax.device_put(plain.params, jax.devices()[0])), "full", texts, mesh=mesh)
except ValueError as error:
    assert "params lie on 1 devices: must lie on the 2 of the mesh" in str(error)
options = {"max_new_tokens": 20, "stop_at_eos": False}
first = generate(one, "full", texts, dtype=jnp.float32, mesh=mesh, block=8, **options)
assert decode_block._cache_size() == 1  # what a turn of the loop leaves lies as what the first was given
turns = [[token] for token in first.last.tolist()]
whole = generate(one, "full", turns, cache=first.cache, **options).tokens
for rows in ([2], [0, 1, 3]):
    some = generate(one, "full", [turns[row] for row in rows], cache=take_rows(first.cache, rows), **options).tokens
    assert some == [whole[row] for row in rows]
"""


@pytest.mark.slow
def test_rows_that_the_devices_do_not_divide_go_on():
    """Taken out of a cache on a mesh, as `eval ruler --draft` does row by row: they lie on every device."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run([sys.executable, "-c", ROWS], env=env, capture_output=True, text=True, timeout=600, cwd=HERE)
    assert done.returncode == 0, done.stderr[-4000:]


def test_mesh_errors_name_what_is_wrong():
    before = os.environ.get("NPROC")
    with pytest.raises(ValueError, match="needs 4096 devices"):
        make_mesh("data=64,model=64")
    assert os.environ.get("NPROC") == before  # 32,768 threads for every process that is started later
    with pytest.raises(ValueError, match="axis=size"):
        make_mesh("rows=2")
    mesh = make_mesh("data=1,model=1")
    assert check_mesh(mesh, PLAIN.attention, 3).shape == {"data": 1, "model": 1}
    abstract = jax.sharding.AbstractMesh((3, 1), ("data", "model"))
    with pytest.raises(ValueError, match="data=3 must divide the batch of 4"):
        check_mesh(abstract, PLAIN.attention, 4)
