"""Run by test_sharding.py in a process of its own with 8 devices: every method, unsharded and on a mesh.

Prints one JSON object a method: the largest difference of logits, whether the decoded tokens agree, and the largest
collective of the compiled decode block. The first argument may be a mesh, `mesh:data=2,tokens=4`; over tokens a second
turn follows. The last ones may be of kernels, `triton:palu`.
"""

import dataclasses
import json
import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from helpers import BLOCK, PLAIN, bases_for, model, prompts, small_configuration

from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.generation.generate import Progress, decode_block
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.parameter_sharding import param_shardings
from lowrank_kv_jax.storage.backend import OVERRIDE
from lowrank_kv_jax.storage.sharding import make_mesh
from lowrank_kv_jax.storage.state import walk

ONE, TWO = (dataclasses.replace(PLAIN, num_layers=n, windows=(None,) * n, context=2048) for n in (1, 2))
LONG, LONG_LENGTHS = 700, [700, 630, 655, 33]  # over tokens: 640 slots a device, which rows pass at different times
SEED = 1  # of a prompt where no two tokens tie for the last place of a budget: rounding on a mesh may choose either
PROMPT, CAPACITY = 96, 1184  # a capacity that no other dimension has, and more than one block of the attention loop
COLLECTIVE = re.compile(r"= (\(?.*?\)?) (all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


def largest_collective(hlo: str) -> int:
    """Elements of the largest array that any collective of the program moves."""
    sizes = [0]
    for line in hlo.splitlines():
        if found := COLLECTIVE.search(line):
            for dims in re.findall(r"\[([\d,]*)\]", found.group(1)):
                sizes.append(math.prod(int(d) for d in dims.split(",") if d))
    return max(sizes)


def decode(method, config, params, mesh, lengths, turn=False):
    bases = bases_for(method, config)
    cache, logits = prefill(
        method, config, params, prompts(4, LONG if turn else PROMPT, seed=SEED), lengths, bases=bases, capacity=CAPACITY,
        block=BLOCK, dtype=jnp.float32, mesh=mesh,
    )
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    progress = Progress(token, jnp.zeros((4,), bool), jnp.zeros((4,), bool))
    keys = jax.vmap(jax.random.key)(jnp.zeros((4,), jnp.uint32))
    steps = jnp.int32(BLOCK)
    program = decode_block.lower(method, config, params, cache, progress, keys, steps, bases=bases).compile()
    moved = 0 if mesh is None else largest_collective(program.as_text())
    cache, progress, first = program(params, cache, progress, keys, steps, bases=bases)
    cache, progress, second = program(params, cache, progress, keys, steps, bases=bases)
    there = ((name, x) for name, x, info in walk(cache) if "batch" in info.axes and 0 not in x.shape)  # nothing lies nowhere
    placed = {name: str(x.sharding.spec) for name, x in there} if mesh else {}
    found = [np.asarray(logits)]
    if turn:
        found.append(np.concatenate([*turn_of(method, config, params, cache, bases)], axis=1))
    return np.concatenate(found, axis=None), np.concatenate([first, second], 1), moved, placed


def turn_of(method, config, params, cache, bases):
    """Logits of a second turn of 2.5 blocks, the last rows shorter."""
    for begin in range(0, 3 * BLOCK, BLOCK):
        counts = jnp.asarray([BLOCK, BLOCK, BLOCK // 2, 0 if begin else 3], jnp.int32)
        tokens = prompts(4, 3 * BLOCK, seed=7)[:, begin : begin + BLOCK]
        cache, logits = extend(method, config, params, cache, tokens, counts, bases=bases)
        cache = refresh(method, cache, bases=bases)
        yield np.where((np.asarray(counts) > 0)[:, None], logits, 0.0)


def main():
    given = sys.argv[1].startswith("mesh:")
    mesh = make_mesh(sys.argv[1][5:] if given else "data=2,model=4")
    turn = "tokens" in mesh.shape
    lengths = jnp.asarray(LONG_LENGTHS if turn else [96, 70, 96, 33], jnp.int32)
    for given_name in sys.argv[1 + given :]:
        name = given_name.removeprefix("triton:")
        method = small_configuration(REGISTRY[name]) if name in REGISTRY else parse_method(name)
        config = TWO if max(map(len, method.layer_groups(TWO.attention))) > 1 else ONE  # two where they are stored together
        if name != given_name:  # chosen while tracing: another context, other programs
            os.environ[OVERRIDE], config = "triton", dataclasses.replace(config, context=config.context - 1)
        plain = model(config).params
        sharded = jax.device_put(plain, param_shardings(config, mesh))
        logits, tokens, _, _ = decode(method, config, plain, None, lengths, turn)
        on_mesh, mesh_tokens, moved, placed = decode(method, config, sharded, mesh, lengths, turn)
        print(json.dumps({
            "method": given_name, "difference": float(np.abs(logits - on_mesh).max()), "rows": 4, "capacity": CAPACITY,
            "same_tokens": bool((tokens == mesh_tokens).all()), "largest_collective": moved,
            "over_data": all("data" in spec for spec in placed.values()),
            "over_model": any("model" in spec for spec in placed.values()),
            "over_tokens": sum("tokens" in spec for spec in placed.values()), "layers": config.num_layers,
        }), flush=True)


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        main()
