"""What every method promises, each as a function of one; `AssertionError` says what is broken."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.generation.generate import GREEDY, Generation, Progress, decode_block, generate
from lowrank_kv_jax.generation.prompts import pad_prompts
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import Cache, fork
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.saving.saved_cache import abstract_cache, load_cache, save_cache
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.testing.models import PLAIN, PROMPT, model, prompts
from lowrank_kv_jax.testing.moments import bases_for
from lowrank_kv_jax.testing.stepwise import run

BLOCK = 8
LENGTHS = (PROMPT, 70)
"""Of two prompts of one batch."""
TOLERANCE = 1e-4
"""Of float32 logits of order 1."""


def equals_full_attention(method: Part, config: ModelConfig = PLAIN, width: int = 8) -> None:
    """A prompt, and 40 tokens behind it, `width` at a time, with refreshes between them: the logits of the full cache."""
    exact = full_logits(config, width)
    _, logits = run(method, config, text(config), PROMPT, width=width)
    assert_exact(logits, exact)


def bytes_are_foretold(method: Part, config: ModelConfig = PLAIN, lengths: tuple[int, int] = LENGTHS) -> None:
    """Every leaf is declared, with its axes; shapes and bytes of a cache are known before it is made."""
    cache, bases = two_blocks(method, config, lengths).cache, bases_for(method, config)
    for path, array, info in walk(cache):
        assert len(info.axes) == array.ndim, f"{path}: {info.axes} of {array.shape}"
        assert "batch" not in info.axes or array.shape[info.axes.index("batch")] == cache.layout.batch, path
    foretold = abstract_cache(method, cache.layout, bases)
    assert shapes_of(foretold) == shapes_of(cache)
    assert cache_bytes(foretold, bases) == cache_bytes(cache, bases)
    assert cache_bytes(cache).total == sum(x.nbytes for x in jax.tree.leaves(cache))


def saves_are_restored(method: Part, config: ModelConfig = PLAIN, lengths: tuple[int, int] = LENGTHS) -> None:
    """A cache that was loaded is the one that was saved."""
    cache, bases, tiny = two_blocks(method, config, lengths).cache, bases_for(method, config), model(config)
    with tempfile.TemporaryDirectory() as folder:
        for compress in (False, True):
            path = Path(folder) / f"cache-{compress}"
            save_cache(path, cache, tiny, bases=bases, compress=compress)
            restored = load_cache(path, method, tiny, bases=bases)
            assert shapes_of(restored) == shapes_of(cache)
            for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(cache), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def forks_are_copies(method: Part, config: ModelConfig = PLAIN, lengths: tuple[int, int] = LENGTHS) -> None:
    """Each row of a fork holds what its origin does."""
    cache, bases = two_blocks(method, config, lengths).cache, bases_for(method, config)
    forked, mine = fork(cache, 2), rows_of(cache)
    assert shapes_of(forked) == shapes_of(abstract_cache(method, forked.layout, bases))
    for row, copy in enumerate(rows_of(forked)):
        assert_same_row(mine[row // 2], copy)


def rows_that_wait_stay(method: Part, config: ModelConfig = PLAIN, lengths: tuple[int, int] = LENGTHS) -> None:
    """A second turn; then a row goes on for two blocks, and the other, which has ended, stays as it is."""
    tiny, bases = model(config), bases_for(method, config)
    turn = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7]]
    second = generate(tiny, method, turn, bases=bases, cache=two_blocks(method, config, lengths),
                      max_new_tokens=BLOCK + 1, stop_at_eos=False)
    assert all(len(row) == BLOCK + 1 for row in second.tokens)
    before = rows_of(second.cache)
    cache, progress = second.cache, Progress(second.last, jnp.array([False, True]), jnp.zeros(2, bool))
    keys = jax.vmap(jax.random.key)(jnp.zeros(2, jnp.uint32))
    for _ in range(2):
        cache, progress, out = decode_block(
            method, config, tiny.params, cache, progress, keys, jnp.int32(BLOCK), bases=bases, sampler=GREEDY, eos=(),
        )
    assert (np.asarray(out)[0] >= 0).all() and (np.asarray(out)[1] < 0).all()
    assert_same_row(before[1], rows_of(cache)[1])


def generates_as_step_by_step(method: Part, config: ModelConfig = PLAIN, lengths: tuple[int, int] = LENGTHS) -> None:
    """The tokens of `generate`, whose loop is one program on the device, are those of single steps, layer by layer."""
    out = two_blocks(method, config, lengths)
    capacity = out.cache.layout.capacity
    tokens, counts = pad_prompts(rows_of_prompts(lengths), config.context)
    text = jnp.concatenate([tokens, jnp.asarray(out.tokens, jnp.int32)[:, :-1]], axis=1)
    _, logits = run(method, config, text, tokens.shape[1], lengths=counts, capacity=capacity, block=BLOCK)
    np.testing.assert_array_equal(logits.argmax(-1), out.tokens)


PROMISES = (bytes_are_foretold, saves_are_restored, forks_are_copies, rows_that_wait_stay, generates_as_step_by_step)
"""Of every method, however much it compresses; `equals_full_attention` is asked where a part says that it is exact."""


# ---- what they share ------------------------------------------------------------------------------------------------


def text(config: ModelConfig, seed: int = 0) -> jax.Array:
    """A prompt, and 40 tokens, int32 `[2, PROMPT + 40]`."""
    return prompts(length=PROMPT + 40, seed=seed, vocab=config.vocab_size)


@functools.cache
def full_logits(config: ModelConfig, width: int = 1) -> np.ndarray:
    """Logits of the uncompressed cache, see `stepwise.run`."""
    return run(parse_method("full"), config, text(config), PROMPT, width=width)[1]


def assert_exact(logits: np.ndarray, exact: np.ndarray) -> None:
    """Raise AssertionError where logits `[..., V]` differ, or the tokens that are most likely."""
    np.testing.assert_allclose(logits, exact, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(logits.argmax(-1), exact.argmax(-1))


def rows_of_prompts(lengths: tuple[int, int]) -> list[list[int]]:
    """Random ids of two rows."""
    return [row[:length].tolist() for row, length in zip(prompts(2, 256), lengths, strict=True)]


@functools.lru_cache(maxsize=1)
def two_blocks(method: Part, config: ModelConfig, lengths: tuple[int, int]) -> Generation:
    """Two rows of different lengths that have decoded two blocks, each with a refresh behind it."""
    out = generate(
        model(config), method, rows_of_prompts(lengths), bases=bases_for(method, config), max_new_tokens=2 * BLOCK + 2,
        block=BLOCK, capacity=320, dtype=jnp.float32, stop_at_eos=False,
    )
    assert all(len(row) == 2 * BLOCK + 2 for row in out.tokens)
    return out


def shapes_of(cache: Cache) -> list[tuple[str, tuple[int, ...], Any]]:
    """Path, shape and dtype of each leaf."""
    return [(path, x.shape, x.dtype) for path, x, _ in walk(cache)]


def rows_of(cache: Cache) -> list[dict[str, np.ndarray]]:
    """Leaves of each row, on the host; of a store the slots that hold a token."""
    leaves = {name: (np.asarray(x), info.axes) for name, x, info in walk(cache) if "batch" in info.axes}

    def slots(name: str) -> int:
        x, axes = leaves[name]
        return x.shape[axes.index("tokens")] if "tokens" in axes else 0

    def of_row(name: str, x: np.ndarray, axes: tuple[str | None, ...], row: int) -> np.ndarray:
        group = ".".join(name.split(".")[:2])
        held = leaves.get(f"{group}.store.tokens.length")
        if held is not None and "tokens" in axes and (".store." in name or ".far_votes" in name):
            most = max(slots(other) for other in leaves if other.startswith(f"{group}.store."))
            used = held[0][row] * slots(name) // most  # of scales that tokens share, the whole ones
            x = np.take(x, np.arange(used), axis=axes.index("tokens"))
        return np.take(x, row, axis=axes.index("batch"))

    return [
        {name: of_row(name, x, axes, row) for name, (x, axes) in leaves.items()} for row in range(cache.layout.batch)
    ]


def assert_same_row(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """Raise AssertionError, naming the leaf, where two rows differ."""
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
