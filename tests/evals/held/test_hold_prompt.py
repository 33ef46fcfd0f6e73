"""What a cache holds of a prompt, and how much attention falls on it."""

import numpy as np
import pytest
from helpers import PLAIN, WINDOWED, bases_for, model, prompts, softmax_attention

import lowrank_kv_jax as lkv
from lowrank_kv_jax.cli.inspect import layer_rows
from lowrank_kv_jax.evals.held.plot import plot_held
from lowrank_kv_jax.evals.held.prompt import QUERIES, attention_on, hold_prompt
from lowrank_kv_jax.generation.forward import read_layer, start_reading
from lowrank_kv_jax.method.held import Held

IDS = prompts(1)[0].tolist()


def test_all_attention_falls_on_a_cache_of_everything():
    found = hold_prompt(model(), lkv.parse_method("full"), IDS)
    np.testing.assert_allclose(found.attention, 1, atol=1e-6)
    assert (found.held == Held.EXACT).all() and not found.summarised
    assert 0 < found.size.total - sum(found.layer_bytes) < 100  # lengths


def test_the_share_is_that_of_the_softmax():
    tokens, there = prompts(1), np.random.default_rng(0).random((3, 4, len(IDS))) < 0.5
    share = attention_on(PLAIN, model().params, tokens, there)
    reading = start_reading(PLAIN, model().params, tokens, None, twice=False)
    for layer in range(3):
        reading, taps = read_layer(PLAIN, model().params, layer, reading)
        causal = np.tril(np.ones((len(IDS),) * 2, bool))[None]
        for head in range(8):  # one token's value is 1, and all others' 0
            one = np.zeros((1, len(IDS), 4, 1))
            one[0, :, head // 2, 0] = there[layer, head // 2]
            out, _ = softmax_attention(taps.q, taps.k, one, causal, PLAIN.attention.scale)
            share[layer, head // 2] -= out[0, -QUERIES:, head, 0].mean() / 2
    np.testing.assert_allclose(share, 0, atol=1e-5)


def test_layers_with_a_window_are_left_out():
    share = attention_on(WINDOWED, model(WINDOWED).params, prompts(1), np.ones((2, 4, len(IDS)), bool))
    assert np.isnan(share[0]).all() and np.isfinite(share[1]).all()


@pytest.mark.parametrize("spec, by_head", [("adakv:budget=32,recent=8", True), ("h2o:budget=32,recent=8+moments", False)])
def test_it_is_drawn(spec, by_head, tmp_path):
    found = hold_prompt(model(), lkv.parse_method(spec), IDS)
    assert found.summarised == ("moments" in spec)
    plot_held(str(tmp_path / "held.png"), spec, found, by_head=by_head)
    assert (tmp_path / "held.png").read_bytes()[1:4] == b"PNG"


def test_chunks_are_counted():
    """Beside how many slots there are for them, in the rows that `inspect` prints."""
    method = lkv.parse_method("osp:rank=4,sinks=4,recent=8,chunk_length=16,min_chunk=8,tau_k=0,chunks=6")
    found = hold_prompt(model(), method, IDS, bases=bases_for(method))
    assert found.counts == ({"chunks": 6, "slots": 6},) * PLAIN.num_layers
    assert [row["chunks"] for row in layer_rows(found)] == [6] * PLAIN.num_layers
    assert hold_prompt(model(), lkv.parse_method("full"), IDS).counts == ({},) * PLAIN.num_layers
