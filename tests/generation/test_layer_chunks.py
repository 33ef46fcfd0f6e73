"""Chunks through the caches of somebody else's decoder: what the package's own decoder makes of the same chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, PROMPT, bases_for, model

import lowrank_kv_jax as lkv
from lowrank_kv_jax.generation.forward import extend, prefill
from lowrank_kv_jax.generation.layers import layer_prefill, layer_prefill_twice
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models import decoder as parts
from lowrank_kv_jax.testing.promises import text

CHUNK, LENGTHS, COUNT = 40, jnp.array([PROMPT, 30], jnp.int32), 8  # the second row ends within the first chunk
TWO = dataclasses.replace(PLAIN, num_layers=2, windows=(None,) * 2)
embed, block_taps, block_output, unembed = (  # operation by operation, every one of them would be compiled
    jax.jit(part, static_argnums=0) for part in (parts.embed, parts.block_taps, parts.block_output, parts.unembed))


class Decoder:
    """A decoder that knows the caches of its layers by plans alone."""

    def __init__(self, method):
        self.config, self.params = TWO, model(TWO).params
        self.plans = lkv.plan_layers(
            method, TWO.attention, prompt=PROMPT, capacity=CAPACITY, block=16, dtype=jnp.float32, bases=bases_for(method, TWO))
        self.twice = method.rereads
        self.caches = []

    def first(self, tokens, lengths):
        counts = jnp.minimum(lengths, tokens.shape[1])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        if self.twice:
            tokens, positions = lkv.prompt_twice(tokens, counts)
        x, layers = embed(self.config, self.params, tokens, positions), iter(self.params["layers"])
        for plan in self.plans:
            taps = []
            for _ in plan.windows:
                if self.twice:
                    x, tap = layer_prefill_twice(self.config, None, next(layers), x, positions, counts)
                else:
                    x, tap = layer_prefill(self.config, None, next(layers), x, positions)
                taps.append(tap)
            self.caches.append(lkv.prefill_layer(plan, taps, lengths, goes_on=True))

    def chunk(self, tokens, counts):
        size, cache = tokens.shape[1], self.caches[0]
        positions = cache.positions(size)
        if self.twice and cache.goes_on:
            tokens, positions = lkv.prompt_twice(tokens, counts, cache.length)
        x, layers = embed(self.config, self.params, tokens, positions), iter(self.params["layers"])
        for i, plan in enumerate(self.plans):
            read = []
            for index in range(len(plan.windows)):
                layer = next(layers)
                taps = block_taps(self.config, layer, x, positions)
                out, own = lkv.attend_chunk(plan, self.caches[i], taps, counts, layer=index)
                x = block_output(self.config, layer, x, out)
                read.append(own)
            self.caches[i] = lkv.add_chunk(plan, self.caches[i], read)
        last = jnp.take_along_axis(x[:, :size], jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
        return unembed(self.config, self.params, last)[:, 0]

    def step(self, tokens):
        positions = self.caches[0].positions(tokens.shape[1])
        x, layers = embed(self.config, self.params, tokens, positions), iter(self.params["layers"])
        for i, plan in enumerate(self.plans):
            for _ in plan.windows:
                layer = next(layers)
                taps = block_taps(self.config, layer, x, positions)
                self.caches[i], out = lkv.append_and_attend(plan, self.caches[i], taps)
                x = block_output(self.config, layer, x, out)
        return unembed(self.config, self.params, x)


QUICK = "kvzip:keep=0.5,layers=uniform,sinks=4,recent=8"
SLOW = ("xkv:group=2,rank=0.5,sinks=4,recent=8", "full", "ojakv:rank=0.5,sinks=4,recent=8", "kivi:bits=4,sinks=4,recent=8",
        "snapkv:keep=0.5,sinks=4,recent=8", "momentkv:sinks=4,recent=8", "osp:rank=0.5,sinks=4,recent=8",
        "kivi:bits=4,sinks=4,recent=8+kvzip:keep=0.5,layers=uniform")


@pytest.mark.parametrize("spec", [QUICK, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW)])
def test_a_prompt_in_chunks_and_a_turn_are_those_of_the_packages_decoder(spec):
    """Rows of different lengths: logits of a turn of one chunk, and of tokens behind it."""
    method = parse_method(spec)
    tokens, params, bases = text(TWO), model(TWO).params, bases_for(method, TWO)
    turn, more = tokens[:, PROMPT : PROMPT + 20], tokens[:, PROMPT + 20 : PROMPT + 20 + COUNT]
    counts = jnp.array([20, 7], jnp.int32)

    decoder = Decoder(method)
    decoder.first(tokens[:, :CHUNK], LENGTHS)
    for begin in range(CHUNK, PROMPT, CHUNK):
        piece = jnp.pad(tokens[:, begin : min(begin + CHUNK, PROMPT)], ((0, 0), (0, max(begin + CHUNK - PROMPT, 0))))
        decoder.chunk(piece, jnp.clip(LENGTHS - begin, 0, CHUNK))
    assert [np.asarray(cache.length).tolist() for cache in decoder.caches] == [LENGTHS.tolist()] * len(decoder.caches)
    decoder.caches = [lkv.end_prompt(cache) for cache in decoder.caches]
    found = decoder.chunk(turn, counts), *decoder.step(more).swapaxes(0, 1)

    cache, _ = prefill(method, TWO, params, tokens[:, :PROMPT], LENGTHS, bases=bases, capacity=CAPACITY, block=16,
                       dtype=jnp.float32, chunk=CHUNK)
    rows = [row[:n].tolist() for row, n in zip(np.asarray(turn), np.asarray(counts), strict=True)]
    cache, logits = lkv.ingest(method, TWO, params, cache, rows, bases=bases, chunk=20)
    cache, after = extend(method, TWO, params, cache, more, bases=bases, all_logits=True)
    np.testing.assert_allclose(np.stack(found), np.stack([logits, *after.swapaxes(0, 1)]), atol=2e-4)


def test_a_chunk_that_a_row_has_no_room_for_is_nan_and_not_added():
    decoder, tokens = Decoder(parse_method("full")), text(TWO)
    decoder.first(tokens[:, :PROMPT], LENGTHS)
    decoder.caches = [lkv.end_prompt(cache) for cache in decoder.caches]
    size = CAPACITY - PROMPT + 1
    logits = decoder.chunk(jnp.zeros((2, size), jnp.int32), jnp.full((2,), size, jnp.int32))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    assert decoder.caches[0].length.tolist() == [PROMPT, 30 + size]


def test_what_does_not_fit_is_refused():
    decoder, tokens = Decoder(parse_method("kvzip:keep=0.5,layers=uniform,sinks=4,recent=8")), text(TWO)
    decoder.first(tokens[:, :CHUNK], LENGTHS)
    plan, cache = decoder.plans[0], decoder.caches[0]
    positions = cache.positions(7)
    taps = block_taps(TWO, decoder.params["layers"][0], embed(TWO, decoder.params, tokens[:, :7], positions), positions)
    with pytest.raises(ValueError, match="the prompt of this cache goes on: `end_prompt`"):
        lkv.append_and_attend(plan, cache, taps)
    with pytest.raises(ValueError, match="the prompt of this cache goes on: `end_prompt`"):
        lkv.refresh_layer(plan, cache)
    with pytest.raises(ValueError, match=r"taps.k \(2, 7, .*reads prompts twice.*even number"):
        lkv.attend_chunk(plan, cache, taps)
    with pytest.raises(ValueError, match=r"layer=1: the plan is of 1 layers, so it must lie in 0..0"):
        lkv.attend_chunk(plan, cache, taps, layer=1)
    with pytest.raises(ValueError, match="counts.0.=8: 7 tokens were given"):
        lkv.attend_chunk(plan, lkv.end_prompt(cache), taps, np.array([8, 1]))
    _, read = lkv.attend_chunk(plan, lkv.end_prompt(cache), taps)
    with pytest.raises(ValueError, match="chunks of 2 layers: this plan is of 1"):
        lkv.add_chunk(plan, lkv.end_prompt(cache), [read, read])


def test_a_cache_whose_prompt_goes_on_is_not_saved(tmp_path):
    decoder = Decoder(parse_method("full"))
    decoder.first(text(TWO)[:, :CHUNK], LENGTHS)
    with pytest.raises(ValueError, match="goes on"):
        lkv.save_layers(tmp_path / "context", decoder.plans, decoder.caches, "weights")
    assert not jax.tree.leaves([*tmp_path.iterdir()])
