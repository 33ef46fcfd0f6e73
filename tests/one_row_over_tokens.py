"""Run by test_over_tokens.py in a process of its own with 4 devices: a conversation of one row, on one device and on all.

Prints one JSON object: the tokens of both turns, and the bytes of the cache and of what one device holds of it.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
from helpers import PLAIN, model, prompts

from lowrank_kv_jax.generation.generate import generate
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.storage.sharding import make_mesh
from lowrank_kv_jax.storage.state import walk

CONFIG = dataclasses.replace(PLAIN, q_heads=6, kv_heads=3, context=4096)


def conversation(model, mesh):
    """Tokens of two turns, and the cache behind them."""
    options = {"max_new_tokens": 40, "stop_at_eos": False}
    first = generate(model, "full", prompts(1, 1500).tolist(), capacity=2040, dtype=jnp.float32, mesh=mesh, **options)
    second = generate(model, "full", prompts(1, 50, seed=3).tolist(), cache=first, **options)
    return first.tokens + second.tokens, second.cache


def main():
    mesh, plain = make_mesh("tokens=4"), model(CONFIG)
    placed = dataclasses.replace(plain, params=jax.device_put(plain.params, param_shardings(CONFIG, mesh)))
    texts, _ = conversation(plain, None)
    on_mesh, cache = conversation(placed, mesh)
    arrays = [x for _, x, _ in walk(cache)]
    print(json.dumps({
        "texts": texts, "on_mesh": on_mesh, "bytes": sum(x.nbytes for x in arrays),
        "of_a_device": sum(x.addressable_shards[0].data.nbytes for x in arrays),
    }))


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
