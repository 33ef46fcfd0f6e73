"""What a cache says of itself."""

import re

import jax
import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, prompts, small_configuration

import lowrank_kv_jax as lkv
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.saving.saved_cache import abstract_cache

OJA = lkv.parse_method("ojakv:rank=0.5,sinks=4,recent=8")


def generated(method):
    return lkv.generate(model(), method, prompts().tolist(), bases=bases_for(method), max_new_tokens=4)


def test_a_generation_shows_its_texts_and_its_cache():
    out = generated(OJA)
    title, _, *parts = repr(out).splitlines()
    assert title.startswith("Generation from a Cache: ojakv:sinks=4,recent=8, ") and title.endswith("x smaller than a full one in 16 bits")
    (keys,) = (line for line in parts if line.startswith("store.tokens.k "))
    assert keys.split()[-4:] == ["coefficients", "0-2", "87", "35.2"] and "[2, 1, 188, 16]" in keys
    assert parts[-2:] == [f"{i}: {row}" for i, row in enumerate(out.tokens)]
    assert "rows: 2, tokens seen: 99 99, room for 200" in repr(out)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_its_bytes_are_those_of_the_cache(name):
    method = small_configuration(REGISTRY[name])
    layout = lkv.Layout(PLAIN.attention, 2, 96, 160, 16, "float32")
    cache = abstract_cache(method, layout, bases_for(method))
    lines = lkv.describe(cache).lines
    assert sum(map(float, (line[-1] for line in lines))) == pytest.approx(lkv.cache_bytes(cache).total / 1024, abs=1)
    assert "tokens seen: unknown" in repr(cache)


def test_layers_that_differ_have_lines_of_their_own():
    lines = lkv.describe(generated(lkv.parse_method("minicache:start=1,budget=9")).cache).lines
    keys = {line[4]: line[5] for line in lines if line[0] == "ends.k"}
    assert keys == {"0": "99", "1-2": "3"}


def test_bases_and_layers_are_described():
    shown = str(lkv.describe(bases_for(OJA)))
    assert shown.startswith("bases of 3 groups of layers, 12.0 KiB\n") and re.search(r"^k +\[1, 32, 16\] .* 0-2", shown, re.MULTILINE)
    plan = lkv.plan_layers("full", PLAIN.attention, prompt=8, capacity=16)[0]
    taps = lkv.Taps(*(np.zeros((1, 8, n, 8), np.float32) for n in (8, 4, 4, 4)))
    cache = lkv.prefill_layer(plan, taps)
    assert repr(cache).startswith("LayerCache: full, ") and "of a block of 16 used: 0" in repr(cache)


def test_a_notebook_shows_a_table():
    html = generated(OJA).cache._repr_html_()
    assert html.startswith("<b>Cache: ojakv") and html.count("<tr>") == html.count("</tr>") > 5


def test_what_was_donated_or_is_traced_is_described():
    cache = generated(OJA).cache
    jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache)
    assert "tokens seen: unknown" in repr(cache)
    seen = []
    jax.eval_shape(lambda c: seen.append(repr(c)) or c, generated(OJA).cache)
    assert "tokens seen: unknown" in seen[0]
