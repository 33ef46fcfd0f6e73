"""A cache whose stored tokens are cut over devices is the cache on one, and only sums and partials travel."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, empty_partial, small_configuration

from lowrank_kv_jax.attention.partial import AttnPartial, merge, merge_over
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.sharding import partition

HERE = Path(__file__).parents[1]
pytestmark = pytest.mark.xdist_group("over_tokens")  # one worker: all read the results of few processes

MESH = "data=2,model=2,tokens=2"
FLOATS = (
    "full", "ojakv", "static-pca", "static-pca-h", "palu", "single-svd", "streamingkv", "xkv", "osp", "osp-static",
    "eigenattention", "eigen-n", "kivi", "kvzip:keep=0.5", "adakv:keep=0.5,decoding=keep",
    "snapkv:keep=0.5,decoding=keep", "kivi:bits=8+kvzip:keep=0.5", "kivi:bits=4+snapkv:keep=0.6,decoding=keep",
    "snapkv:keep=0.5,decoding=code", "kivi:bits=8+snapkv:keep=0.6,decoding=code",
    "transform:heads=per_head,steps=prompt,sinks=4,recent=8", "transform:heads=per_head,kv=joint,sinks=4,recent=8",
)
IN_BITS = ("transform", "ojakv:bits=8,rank=0.5,sinks=4,recent=8", "ojakv:bits=2.5,sinks=4,recent=8")
"""Whose codes are of coefficients: where two sums differ in a last bit, a code may differ by a step."""

QUICK = ("full",)
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*FLOATS, *IN_BITS)]


def on_devices(count, *arguments):
    """What a process with so many devices prints."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=1200, cwd=HERE)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@functools.cache
def record_of(name):
    return json.loads(on_devices(8, "sharded_methods.py", f"mesh:{MESH}", name))


@pytest.mark.parametrize("name", CASES)
def test_cut_equals_whole(name):
    """Prompts of several lengths, steps over two refreshes, a second turn; slots, rows and heads cut at once."""
    record = record_of(name)
    assert record["difference"] < (2e-3 if name in IN_BITS else 1e-4) and record["same_tokens"]
    assert record["over_data"] and record["over_model"] and record["over_tokens"] >= record["layers"]


@pytest.mark.parametrize("name", CASES)
def test_no_collective_moves_tokens(name):
    """Neither a step nor a refresh: what travels is smaller than a quarter of a device's slots of a head.

    Of `xkv`, whose heads share coefficients, those of a block travel between the devices of heads.
    """
    record = record_of(name)
    assert 0 < record["largest_collective"] <= record["capacity"] * PLAIN.head_dim // (1 if name == "xkv" else 8)


@pytest.mark.slow
def test_kernels_attend_to_their_devices_slots(monkeypatch):
    monkeypatch.setenv("LOWRANK_KV_BACKEND", "triton")
    names = ("full", "ojakv:rank=0.5,rope=pre,sinks=4,recent=8", "osp:rank=0.5,sinks=4,recent=8",
             "adakv:keep=0.5,sinks=4,recent=8,decoding=keep", "kivi:bits=4,recent=8+kvzip:keep=0.5,decoding=keep")
    for line in on_devices(8, "sharded_methods.py", f"mesh:{MESH}", *names).splitlines():
        record = json.loads(line)
        assert record["same_tokens"] and record["difference"] < 1e-4
        assert record["largest_collective"] <= record["capacity"] * PLAIN.head_dim // 8


@pytest.mark.slow
def test_generate_over_more_devices_than_heads():
    """One row, four devices, three kv heads: a conversation of two turns, and the bytes of a device."""
    found = json.loads(on_devices(4, "one_row_over_tokens.py"))
    assert found["texts"] == found["on_mesh"]
    assert found["of_a_device"] < 0.3 * found["bytes"]


def test_partials_merge_over_an_axis():
    rng = np.random.default_rng(0)
    out, lse = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, 1, 4, 8), (3, 2, 1, 4)))
    empty = empty_partial(2, 1, 4, 8)
    parts = [AttnPartial(out[i], lse[i]) for i in range(2)] + [empty]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    together = jax.vmap(functools.partial(merge_over, axis="tokens"), axis_name="tokens")(stacked)
    for mine, theirs in zip(together, merge(parts), strict=True):
        for device in mine:
            np.testing.assert_allclose(device, theirs, rtol=1e-6)
    nothing = jax.tree.map(lambda x: jnp.stack([x, x]), empty)
    none = jax.vmap(functools.partial(merge_over, axis="tokens"), axis_name="tokens")(nothing)
    assert not np.any(none.out) and np.all(np.isneginf(none.lse))


def layout_over(devices, capacity=200):
    mesh = jax.sharding.AbstractMesh((1, devices), ("data", "tokens"))
    return Layout(PLAIN.attention, 1, 40, capacity, 10, "float32", mesh)


@pytest.mark.parametrize("name", ["full", "kivi:group=24,sinks=4,recent=8", "osp", "kvzip:keep=0.5"])
def test_every_device_has_whole_registers_and_tiles(name):
    method = small_configuration(REGISTRY[name]) if name in REGISTRY else parse_method(name)
    bases = bases_for(method, PLAIN)
    layout = layout_over(4)
    state = jax.eval_shape(lambda: machine_of(method).init(layout, bases[0] if bases else None))
    assert state.store.tokens.k.shape[2] % (4 * 128) == 0
    sides = [x for x in (state.store.tokens.k,) if hasattr(x, "tile")]
    assert all(x.shape[2] % (4 * x.tile.tokens) == 0 for x in sides)


@pytest.mark.parametrize("name", ["transform:smaller=3,sinks=4,recent=8", "xkv:smaller=2,sinks=4,recent=8"])
def test_a_wanted_size_is_that_on_one_device(name):
    """As many bits or columns a token: slots that are there for the devices' sake must not change the answer."""
    method = parse_method(name)
    bases = bases_for(method, PLAIN) or machine_of(method).default_bases(PLAIN.attention)
    cut = dataclasses.replace(layout_over(4), prompt=180)

    def channels(layout):
        store = jax.eval_shape(lambda: machine_of(method).init(layout, bases[0])).store
        return store.tokens.k.shape[3], store.tokens.v.shape[3]

    assert channels(cut) == channels(dataclasses.replace(cut, mesh=None))


@pytest.mark.parametrize("name, why", [
    ("h2o:keep=0.5", "decoding=evict cannot be cut over the mesh axis tokens=4.*give decoding=keep or code"),
    ("adakv:keep=0.5,decoding=code", "decoding=code of heads that share a layer's budget cannot be cut .*give decoding=keep"),
    ("quest", "a reading cannot be cut .*may all lie on one device"),
    ("shadowkv", "a reading cannot be cut"),
    ("snapkv:keep=0.5,decoding=keep,positions=cache", "positions=cache cannot be cut"),
    ("minicache", "its tokens cannot be cut .*exact ends"),
])
def test_what_cannot_be_cut_says_why(name, why):
    method = small_configuration(REGISTRY[name]) if name in REGISTRY else parse_method(name)
    with pytest.raises(ValueError, match=why):
        machine_of(method).init(layout_over(4), machine_of(method).default_bases(PLAIN.attention)[0])
    machine_of(method).init(layout_over(1), machine_of(method).default_bases(PLAIN.attention)[0])


def test_heads_need_not_divide():
    mesh = jax.sharding.AbstractMesh((1, 3), ("data", "tokens"))
    assert PLAIN.kv_heads % 3
    assert partition(mesh, ("batch", "kv_heads", "tokens", "rank"), (1, 4, 384, 8)) == jax.sharding.PartitionSpec(
        None, None, "tokens", None)
    assert partition(mesh, ("batch", "kv_heads", "end_tokens", "rank"), (1, 4, 384, 8)) == jax.sharding.PartitionSpec(
        None, None, None, None)
