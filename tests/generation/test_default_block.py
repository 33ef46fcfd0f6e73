"""Tokens between two refreshes where nobody says how many: the method's, and whoever says it is heard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, prompts
from suites import Letters

import lowrank_kv_jax as lkv
from lowrank_kv_jax.evals.asking.prefill_many import prefill_many
from lowrank_kv_jax.evals.perplexity.score import perplexity, score_many
from lowrank_kv_jax.evals.studies.cross_layer.cost import smaller_at
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.generation.generate import decode_block, generate
from lowrank_kv_jax.method import Part
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.serving import Engine

CODED = "transform:metric=plain,sampled=False"
BLOCKS = {
    "full": 32, "kivi": 32, "ojakv:bits=4": 32, "snapkv:keep=0.5": 32, "quest": 32, "kivi+kvzip:keep=0.5": 32,
    CODED: 16, "transform:smaller=8,group=2,kv=joint": 16, "transform:kvtc,smaller=8": 16,
    f"{CODED}+kvzip:keep=0.5": 16,  # the codec decides
}
EXACT = f"{CODED},bits=none,recent_bits=none"
ONE = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))


def test_only_transform_asks_for_fewer():
    assert {name for name, part in REGISTRY.items() if part.default_block != 32} == {"transform"}
    assert {spec: parse_method(spec).default_block for spec in BLOCKS} == BLOCKS


@pytest.mark.parametrize(("spec", "block"), [
    pytest.param("kivi", 32, marks=pytest.mark.slow), (CODED, 16), pytest.param(f"{CODED}+kvzip:keep=0.5", 16, marks=pytest.mark.slow),
])
def test_every_way_to_a_cache_has_the_methods_block(spec, block):
    config, tiny, bases = ONE, dataclasses.replace(model(ONE), tokenizer=Letters()), bases_for(parse_method(spec), ONE)
    cache, _ = prefill(spec, config, tiny.params, prompts(1, 64), bases=bases)
    assert (cache.layout.block, cache.layout.capacity) == (block, 64 + block)
    given = {"bases": bases, "dtype": "float32"}
    assert generate(tiny, spec, [[1, 2, 3]], max_new_tokens=2, capacity=64, **given).cache.layout.block == block
    assert generate(tiny, spec, [[1, 2, 3]], max_new_tokens=2, capacity=64, block=8, **given).cache.layout.block == 8
    plans = lkv.plan_layers(spec, config.attention, prompt=64, bases=bases)
    assert plans[0].layout.block == block
    for wanted, asked in ((block, {}), (8, {"block": 8})):
        engine = Engine(tiny, spec, prompt=64, room=64, slots=1, **given, **asked)
        assert [layout.block for layout in engine.layouts] == [wanted]
    with pytest.raises(ValueError, match="^block=0: must be at least 1$"):
        Engine(tiny, spec, prompt=64, room=64, block=0, **given)


def test_methods_of_one_prefill_have_a_block_each_and_one_capacity():
    methods = {spec: parse_method(spec) for spec in ("full", CODED)}
    bases, tokens = {CODED: bases_for(methods[CODED], ONE)}, prompts(2, 64)
    for block, wanted in ((None, [32, 16]), (8, [8, 8])):
        caches, _ = prefill_many(methods, ONE, model(ONE).params, tokens, bases=bases, capacity=160, block=block)
        assert [cache.layout.block for cache in caches.values()] == wanted
        assert {cache.layout.capacity for cache in caches.values()} == {160}
        alone, _ = prefill(CODED, ONE, model(ONE).params, tokens, bases=bases[CODED], capacity=160, block=block)
        jax.tree.map(np.testing.assert_array_equal, caches[CODED], alone)


@pytest.mark.slow
def test_texts_are_scored_in_the_methods_blocks():
    """Predictions are compared token by token, whatever blocks they were made in."""
    methods: dict[str, Part] = {spec: parse_method(spec) for spec in ("full", EXACT)}
    bases, tokens = {EXACT: bases_for(methods[EXACT])}, np.asarray(prompts(2, 150))
    exact_bytes = {}
    for block in (None, 24):
        found = {one.spec: one for one in score_many(
            model(), methods, tokens, 64, bases=bases, dtype="float32", block=block)}
        exact, coded = (found[spec].perplexity for spec in ("full", EXACT))
        np.testing.assert_allclose(coded.nll, exact.nll, atol=1e-4)
        assert exact.divergence is not None and coded.divergence is not None
        assert coded.divergence.shape == (2, 86) and coded.divergence.max() < 1e-5
        exact_bytes[block] = found[EXACT].size.by_kind["exact"]
    of_token = 2 * 3 * 4 * 8 * 4  # keys and values of three layers, four heads of eight channels in float32
    assert exact_bytes[24] - exact_bytes[None] == 8 * of_token
    one = perplexity(model(), methods[EXACT], tokens, 64, bases=bases[EXACT], dtype="float32")
    np.testing.assert_allclose(one.nll, exact.nll, atol=1e-4)


@pytest.mark.parametrize("spec", [
    pytest.param("transform:smaller=8", marks=pytest.mark.slow), "transform:smaller=8,group=3,kv=joint"])
def test_bytes_meet_what_is_asked_for_at_the_default_block(spec):
    method = parse_method(spec)
    bases, params, tokens = bases_for(method), model().params, prompts(1, 448)
    found = {}
    for block in (None, 16, 32):
        cache, _ = prefill(method, PLAIN, params, tokens, bases=bases, capacity=480, block=block)
        found[block] = lkv.cache_bytes(cache)
        assert 8 * 0.985 <= found[block].smaller <= 8 * 1.25
    assert found[None] == found[16]
    assert found[16].by_kind["coefficients"] > found[32].by_kind["coefficients"]


def test_the_costs_of_bases_are_of_the_methods_block(monkeypatch):
    method = parse_method("xkv:group=3,sinks=0,recent=0,rank=0.25")
    longer = smaller_at(method, PLAIN.attention, 256)
    monkeypatch.setattr(type(method), "default_block", 8)
    assert smaller_at(method, PLAIN.attention, 256) != longer


def test_shorter_blocks_are_the_same_programs_whatever_is_asked():
    bases = bases_for(parse_method(CODED), ONE)
    before = decode_block._cache_size()
    for count in (1, 15, 60):
        generate(model(ONE), CODED, [[1, 2, 3]], bases=bases, max_new_tokens=count, capacity=160, dtype=jnp.float32)
    assert decode_block._cache_size() == before + 1
