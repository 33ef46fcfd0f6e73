"""Keys that are coded turned by their place in a tile, against float64 tokens: folded queries, and keys that are rebuilt."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, random_moments, softmax_attention
from jax.sharding import AbstractDevice, AbstractMesh
from transform_oracle import LAYOUT, SPEC, oracle, oracle_of_both, tokens_like

from lowrank_kv_jax.attention.turning import TILE
from lowrank_kv_jax.generation.forward import decode_step, prefill, refresh
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import tiles
from lowrank_kv_jax.segments import coded as coded_tokens
from lowrank_kv_jax.storage.backend import OVERRIDE, platform
from lowrank_kv_jax.storage.lanes import lay_out
from lowrank_kv_jax.storage.positions import PerHead, Runs
from lowrank_kv_jax.storage.tokens_last import tokens_last_of

GPU = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
COUNT = 2 * TILE + 50
AT, COUNTS = jnp.full((2, 3), COUNT + 60), jnp.array([COUNT, TILE + 9])
WHERE = Runs(jnp.stack([jnp.zeros(2, jnp.int32), COUNTS], 1), jnp.asarray([[4, 0], [4, 0]]))


def turned(k, at):
    """Keys `[B, T, K, D]` after RoPE at positions `[T]`, float64, as the paper writes it."""
    angle = np.asarray(at)[:, None, None] * SPEC.rope.inverse_frequencies()
    a, b = np.split(np.asarray(k, np.float64), 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def as_read(method, bases, store, tokens):
    """Keys after RoPE and values of the last layer, float64: deviations from the mean turn with the place before they are
    coded and with the tile's beginning after it, the mean with both."""
    means, runs = [np.asarray(x, np.float64) for x in (store.k_mean, store.v_mean)], store.tokens.k.runs
    place = np.arange(COUNT) % TILE
    keys = [turned(np.asarray(x.k_pre) - m[:, None], place) for x, m in zip(tokens, means[0].swapaxes(0, 1), strict=True)]
    values, none = [x.v for x in tokens], 0 * means[0]
    if method.kv == "joint":
        k, v = oracle_of_both(bases, keys, values, runs, (none, means[1]))
    else:
        k, v = oracle(bases, "k", keys, runs, none), oracle(bases, "v", values, store.tokens.v.runs, means[1])
    at = 4 + np.arange(COUNT)
    return turned(k[-1], at - place) + turned(np.repeat(means[0][:, -1:], COUNT, axis=1), at), v[-1]


def _with_room(stored):
    """Packed tokens with empty slots up to four tiles."""
    return dataclasses.replace(stored, codes=jnp.pad(stored.codes, [(0, 0), (0, 0), (0, 4 * TILE - COUNT), (0, 0)]))


@pytest.mark.parametrize("spec", [
    "bits=3", *(pytest.param(spec, marks=pytest.mark.slow) for spec in
                ("bits=2.5,heads=per_head,group=3,metric=plain", "bits=2,group=2,kv=joint")),
])
def test_folded_queries_and_rebuilt_keys_give_what_the_oracle_does(spec, monkeypatch):
    """On a CPU and as an accelerator runs it, over rows and columns of bytes; of tokens in no order keys are rebuilt."""
    method = parse_method(f"transform:{spec},rope=tile")
    moments = random_moments(PLAIN, means=True, group=method.group)
    bases = method.fit(SPEC, moments)[0]
    q, tokens = zip(*(tokens_like(moments, layer, layer, COUNT) for layer in range(bases.layers)), strict=True)
    q, place, weight = q[-1], Place(index=bases.layers - 1), (jnp.arange(COUNT)[None] < COUNTS[:, None]).astype(jnp.float32)

    @jax.jit
    def stored(bases, tokens):
        store = method.learn(LAYOUT, bases, method.empty(LAYOUT, bases, COUNT), tokens, COUNTS, weight)
        return method.take_in(LAYOUT, bases, store, tokens, COUNTS, COUNTS, WHERE)

    store = stored(bases, tuple(tokens))
    k, v = as_read(method, bases, store, tokens)
    seen = np.broadcast_to(np.arange(COUNT) < np.asarray(COUNTS)[:, None, None], (2, 3, COUNT))
    wanted = softmax_attention(q, k, v, seen, SPEC.scale)

    def check(store, dtype=q.dtype, atol=2e-3, wanted=wanted):
        part = jax.jit(lambda store, q: method.attend(LAYOUT, bases, store, q, AT, place))(store, q.astype(dtype))
        for found, expected in zip(part, wanted, strict=True):
            np.testing.assert_allclose(found, expected, atol=atol)

    def with_tokens(**fields):
        return dataclasses.replace(store, tokens=dataclasses.replace(store.tokens, **fields))

    in_columns = {side: dataclasses.replace(own, codes=tokens_last_of(own.codes))
                  for side in "kv" if hasattr(own := getattr(store.tokens, side), "runs")}
    pays = tiles.pays
    monkeypatch.setattr(tiles, "pays", lambda *_: True)  # for three queries of so small a model
    for held in (store, with_tokens(**in_columns), lay_out(store, "lanes")):
        check(held)  # the third tile is alone in its step
    for able, atol in ((True, 1e-2), (False, 2e-3)):
        monkeypatch.setattr(tiles, "multiplies_16_bits", lambda able=able: able)
        check(with_tokens(**in_columns), atol=atol)
    of_device = {side: dataclasses.replace(own, codes=own.codes[:, :, TILE : 2 * TILE])
                 for side in in_columns for own in [getattr(store.tokens, side)]}
    where = store.tokens.positions.from_slot(TILE)
    of_device = with_tokens(**of_device, positions=where, length=jnp.clip(COUNTS - TILE, 0, TILE))
    assert tiles.tile_by_tile(coded_tokens.cached_tokens(of_device.tokens))
    there = (np.arange(COUNT) >= TILE) & (np.arange(COUNT) < 2 * TILE)
    check(of_device, wanted=softmax_attention(q, k, v, seen & there, SPEC.scale))
    monkeypatch.setenv(OVERRIDE, "xla")
    with jax.sharding.use_abstract_mesh(GPU):  # all tiles at once, of which the last is shorter
        assert platform() == "cuda"
        check(store)
        monkeypatch.setattr(tiles, "block_for", lambda *_: 2 * TILE)  # in turns, each of which begins with a tile
        check(with_tokens(**{side: _with_room(getattr(store.tokens, side)) for side in in_columns}))
        monkeypatch.setattr(tiles, "pays", pays)
        assert not tiles.pays(q[:, :1], coded_tokens.cached_tokens(store.tokens), SPEC.kv_heads, SPEC.rope)
    monkeypatch.undo()
    if method.heads == "joint":  # a head alone has too few bytes here for a kernel
        monkeypatch.setenv(OVERRIDE, "triton")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no other way is taken
            check(store, jnp.bfloat16, 6e-2)
        monkeypatch.undo()
    where = jnp.broadcast_to(4 + jnp.arange(COUNT, dtype=jnp.int32), (2, store.tokens.k.shape[1], COUNT))
    in_no_order = with_tokens(positions=PerHead(where, None, SPEC.kv_heads))
    for held in (store, in_no_order):
        check(held)
    votes = jax.jit(lambda store, q: method.logits(LAYOUT, bases, store, q, place))(store, q)
    keys = np.repeat(k, SPEC.group_size, axis=2)
    found = np.einsum("btnd,bnsd->btns", votes.q, np.repeat(votes.keys, SPEC.group_size, 1))
    np.testing.assert_allclose(found, np.einsum("btnd,bsnd->btns", q, keys), atol=4e-3)


@pytest.mark.slow
def test_whole_caches_fold_as_they_rebuild(monkeypatch):
    """Of prompts that end in different tiles, before a refresh and after it, where queries are folded and where keys are
    rebuilt: slots and positions begin tiles together all along."""
    config = dataclasses.replace(PLAIN, context=1024)
    params, method = model(config).params, parse_method("transform:bits=8,rope=tile,sinks=4,recent=8,sampled=False")
    bases = bases_for(method, config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 2 * TILE + 20)), jnp.int32)

    def logits():
        cache, _ = prefill(method, config, params, tokens, jnp.array([2 * TILE + 20, TILE + 7]), bases=bases,
                           capacity=2 * TILE + 60, block=8)
        found = []
        for step in range(12):
            if step == 8:
                cache = refresh(method, cache, bases=bases)
            cache, last = decode_step(method, config, params, cache, tokens[:, step], bases=bases)
            found.append(np.asarray(last))
        return np.stack(found)

    found = []
    for folds in (True, False):
        monkeypatch.setattr(tiles, "pays", lambda *given, folds=folds: folds and given[0].shape[1] == 1)
        jax.clear_caches()
        found.append(logits())
    np.testing.assert_allclose(*found, atol=4e-3 * np.abs(found[1]).max())
    assert np.any(found[0] != found[1])  # two ways indeed
