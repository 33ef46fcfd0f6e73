"""Run by test_engine.py in a process of its own with 8 devices: an engine on a mesh beside one on a single device."""

import dataclasses

import jax
from helpers import PLAIN, Model, model
from test_engine import BEHIND, BLOCK, FULL, PREFIX, ROWS, Engine, Request, answered, bases_for, programs

from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.storage.sharding import make_mesh

CONFIG = dataclasses.replace(PLAIN, num_layers=2, windows=(None, None))


def tokens(method, params, mesh):
    engine = Engine(
        Model(CONFIG, params), method, bases=bases_for(method, CONFIG), slots=3, prompt=64, room=96, prefixes=1, block=BLOCK,
        dtype="float32", mesh=mesh,
    )
    requests = [Request(row, max_new_tokens=17) for row in ROWS]
    requests += [Request(row, prefix=PREFIX, max_new_tokens=12) for row in BEHIND]
    return [answer.tokens for answer in answered(engine, requests)]


def chunks_compile_nothing_after_a_warm_up(plain):
    """On a mesh as `jax.make_mesh` makes it, whose axes are explicit."""
    mesh = jax.make_mesh((1, 4), ("data", "model"))
    loaded = Model(CONFIG, jax.device_put(plain, param_shardings(CONFIG, mesh)))
    engine = Engine(
        loaded, FULL, slots=2, prompt=64, room=32, prefixes=1, block=BLOCK, dtype="float32", mesh=mesh, prefill_chunk=24)
    for pool in engine._pools:
        held = sum(shard.data.nbytes for x in jax.tree.leaves((pool._cache, pool._kept))
                   for shard in x.addressable_shards)  # each device's copy of what it holds
        assert held <= pool.bytes < held + 100, (held, pool.bytes)  # counters of one device are counted of each
    engine.warm_up()
    with programs() as compiled:
        answered(engine, [Request(ROWS[0], max_new_tokens=2), Request(BEHIND[0], prefix=PREFIX, max_new_tokens=2)])
    assert not compiled, compiled


def main():
    plain = model(CONFIG).params
    heads, slots = make_mesh("data=2,model=4"), make_mesh("data=2,tokens=4")
    for spec, mesh in (("full", heads), ("xkv:sinks=4,recent=8", heads), ("kivi:sinks=4,recent=8", heads), ("full", slots)):
        sharded = jax.device_put(plain, param_shardings(CONFIG, mesh))
        method = parse_method(spec)
        assert tokens(method, plain, None) == tokens(method, sharded, mesh), spec
        print(f"{method.name}:{mesh.axis_names[-1]}", flush=True)
    chunks_compile_nothing_after_a_warm_up(plain)
    print("chunks", flush=True)


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
