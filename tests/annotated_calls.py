"""Calls that reach every function whose signature says shapes; see `annotations.py`."""

import dataclasses
import functools

import character_tokenizer
import jax
import jax.numpy as jnp
import numpy as np
from helpers import PLAIN, bases_for

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import AttentionSpec
from lowrank_kv_jax.calibration.calibrate import moments_for
from lowrank_kv_jax.calibration.corpus import token_windows
from lowrank_kv_jax.calibration.taps import spread
from lowrank_kv_jax.estimators import (
    ESTIMATORS,
    by_products,
    linalg,
    make_estimator,
    moments,
    rank,
    rank_allocation,
    subspace_iteration,
    svd,
    whitening,
)
from lowrank_kv_jax.estimators.gha_tail import update_tail
from lowrank_kv_jax.estimators.turned import turned
from lowrank_kv_jax.generation.generate import ingest
from lowrank_kv_jax.generation.sampling import sample
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.storage import (
    block_reads,
    eight_bits,
    lanes,
    on_host,
    packed,
    pages_in_rows,
    positions,
    precise,
    quantised,
    water_filled,
)
from lowrank_kv_jax.storage.basis import RowsOf, whole_basis
from lowrank_kv_jax.testing.models import Model

ONE = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))
SPECS = (
    "kivi:bits=2+snapkv:budget=24,sinks=4,recent=8",
    "kivi:bits=4+adakv:budget=24,sinks=4,recent=8,decoding=keep+moments",
    "ojakv:sinks=4,recent=8,bits=8,estimator=gha", "ojakv:follow,sinks=4,recent=8", "ojakv:sinks=4,recent=8,bits=2.5+h2o:budget=24,sinks=4,recent=8",
    "transform:sinks=4,recent=8+kvzip:budget=24,sinks=4,recent=8", "shadowkv:budget=24,sinks=4,recent=8,outliers=1,values=host",
    "osp:sinks=4,recent=8,chunk_length=32,rope=pre", "static-pca:sinks=4,recent=8+quest:budget=24,sinks=4,recent=8",
    "osp:follow,sinks=4,recent=8,chunk_length=32", "osp:sinks=4,recent=8,chunk_length=16,chunks=2,energy=0.8,head_ranks=own", "scissorhands:budget=24,sinks=4,recent=8", "streamingkv:sinks=4,recent=8",
    "xkv:sinks=4,recent=8,bits=2.5,centred=true", "minicache:budget=24,start=0", "transform:sinks=4,recent=8", "transform:kv=joint,sinks=4,recent=8", "transform:rope=tile,sinks=4,recent=8", "kivi:bits=8+h2o:budget=24,sinks=4,recent=8+moments:dtype=int16",
)


def serve(method, bases, params, tokens, more):
    """A ragged batch: prompts, as a whole and in chunks, a block, a refresh, a step, and the cache on lanes."""
    given = {"bases": bases, "capacity": 128, "block": 8}
    lkv.prefill(method, PLAIN, params, tokens, jnp.array([96, 70]), chunk=40, **given)
    cache, logits = lkv.prefill(method, PLAIN, params, tokens, jnp.array([96, 70]), **given)
    cache, _ = lkv.extend(method, PLAIN, params, cache, more, jnp.array([4, 3]), bases=bases, all_logits=True)
    cache = lkv.refresh(method, cache, bases=bases)
    cache = lkv.with_token_layout(cache, "lanes")
    cache, logits = lkv.decode_step(method, PLAIN, params, cache, more[:, 0], bases=bases, active=jnp.array([True, False]))
    return logits


def learn(estimator, x, weight):
    """What estimators do with tokens, weights and a start."""
    learned = estimator.init(x.shape[:-2], x.shape[-1], jnp.eye(x.shape[-1])[:, :2])
    learned = estimator.forget(estimator.update(estimator.update(learned, x), x, weight), 0.5)
    return estimator.basis(learned, 3)


def subspaces(x, moment):
    low = linalg.cholesky(moment), svd.second_moment(x.swapaxes(1, 2)), subspace_iteration.wide_gram(x[:, :1].swapaxes(1, 2))
    low = *low, by_products.iterated_subspace(moment, 3), by_products.leading_factor(moment, 3, shrink=True), svd.spectrum(moment)
    low = *low, by_products.iterated_spectrum(moment), linalg.orthonormal_update(moment[..., :4], moment[..., :2], moment[..., :4, :2])
    low = *low, precise.gram(moment)
    return *low, subspace_iteration.leading_subspace(jnp.zeros((300, 300)), 8), update_tail(x[0].mT[..., :2], x[0].mT[..., :3], x[0], None, 0.1)


def stored(x, taps):
    """What the storage does that no method above asks of it; x `[B, J, S, R]`."""
    length, some = jnp.array([2, 3]), x[:, :, :4]
    quantised.store_tokens(x, 4, jnp.float32)
    quantised.store_basis(x, "int8")
    lanes.tokens_on_lanes(x).write_tokens(some, length, length)
    filled = water_filled.empty_water_filled(2, 3, 10, ((4, 8),))
    lanes.tokens_on_lanes(filled.write_block(0, some)).write_tokens(some, length, length)
    water_filled.unpack(water_filled.pack(some, ((4, 8),)), ((4, 8),))
    positions.PerHead(jnp.zeros((2, 3, 10), jnp.int32), None, 3).of_device(length[0])
    packed.of_some_heads(packed.empty_packed(2, 3, 10, 4, 4, 4), length[0], 1)
    on_host.on_host(x).read_block(length[0], 4)
    held = eight_bits.eight_bits_of(x, x.dtype)
    held.filled(x[:, :, :4]).read_block(length[0], 4)
    for wide in (jnp.zeros((1, 1, 64, 128)), jnp.zeros((1, 1, 64, 16))):
        held = pages_in_rows.in_pages(wide, 8, "exact")
        held.read_block(length[0], 4)
        block_reads.slice_block(held.of_pages(jnp.zeros((1, 2, 3), jnp.int32)), length[0], 4)
    pages_in_rows.ChosenPages(wide, jnp.zeros((1, 2, 3), jnp.int32), 8).widened()
    gaps = jnp.zeros((2, 2), jnp.int32)
    moments.moments_across([taps, taps], jnp.ones((2, 3), bool))
    moments.moments_by_values([taps, taps], jnp.ones((2, 3), bool))
    return positions.Runs(gaps, gaps).slots_through(gaps), positions.Runs(gaps, gaps).of_each(length)


def drawn(logits):
    keys = jax.vmap(jax.random.key)(jnp.arange(len(logits)))
    return sample(lkv.Sampler(1.0, 5, 0.9), logits, keys, jnp.int32(3))


def on_the_host():
    """Functions of NumPy arrays."""
    moment = np.diag(np.arange(1.0, 9.0))
    whitening.truncate(moment, 4, "x")
    whole_basis(RowsOf(jnp.ones((1, 8, 2)), 4, 4), 2)
    rank.rank_for_energy(np.arange(8.0, 0.0, -1.0), 0.9)
    spread(token_windows(character_tokenizer.Characters(), ["a text" * 9], 8, 2), 4, 2)
    rank_allocation.allocate_ranks(np.array([[1.0, 2.0], [4.0, 1.0]]), 64, 8, 64)
    rank_allocation.nearest_ranks(np.array([[1.0, 2.0], [4.0, 1.0]]), 64, 8, 64)
    kept, keys = AttentionSpec(1, 2, 1, 4, RopeSpec(100.0, 4), 64, (None,)), np.eye(4)[None]
    turned(kept, moments.Moments(2, keys, keys, keys, keys[None], keys[None], k_pre_sum=np.ones((1, 4))), (5,))


def talk():
    """Two turns, with moments of the tokens, of a model that runs."""
    tiny = Model(ONE, init_params(ONE, jax.random.key(0)))
    first = lkv.generate(tiny, "full", [[1, 2, 3], [4, 5]], max_new_tokens=2, block=2)
    second = lkv.generate(tiny, "full", [[1], [4, 5]], max_new_tokens=1, cache=first)
    lkv.generate(tiny, "full", [[1, 2]], max_new_tokens=2, by_layers=True)
    lkv.held_tokens(second.cache)
    ingest(lkv.parse_method("full"), ONE, tiny.params, second.cache, [[1], [2, 3]])
    moments_for(tiny, [lkv.parse_method("ojakv")], np.ones((1, 16), np.int32))


def served():
    """Requests that come and go, one of them behind a prefix."""
    tiny = Model(ONE, init_params(ONE, jax.random.key(0)))
    engine = lkv.serve.Engine(tiny, "full", slots=2, prompt=8, room=8, prefixes=1, block=2)
    for prefix in ([1, 2], [1, 2], None):
        engine.submit(lkv.serve.Request([3, 4], prefix=prefix, max_new_tokens=3, temperature=1.0, top_k=5))
    engine.run()


def call_everything():
    params = jax.eval_shape(lambda: init_params(PLAIN, jax.random.key(0)))
    for method in map(lkv.parse_method, SPECS):
        jax.eval_shape(functools.partial(serve, method, bases_for(method)), params, jnp.zeros((2, 96), jnp.int32), jnp.zeros((2, 4), jnp.int32))
    x, weight = jnp.ones((2, 3, 10, 8)), jnp.ones((2, 3, 10))
    for name in ESTIMATORS:
        jax.eval_shape(functools.partial(learn, make_estimator(name, size=4)), x, weight)
    jax.eval_shape(subspaces, x, x.mT @ x)
    jax.eval_shape(drawn, jnp.ones((2, 9)))
    jax.eval_shape(stored, x, lkv.Taps(x, x, x, x))
    on_the_host()
    talk()
    served()
