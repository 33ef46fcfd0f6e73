"""Selections in layers with a sliding window: what no later query sees takes no place of the budget."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, WINDOWED, logits_through_a_cache, model, prompts

from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.votes import above_average, prompt_votes, total_attention
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.testing.promises import bytes_are_foretold, forks_are_copies, saves_are_restored

WINDOW, SINKS = 24, 3
SLIDING = dataclasses.replace(PLAIN, num_layers=2, windows=(WINDOW, WINDOW))
ENDS = f"budget={SINKS + WINDOW},sinks={SINKS},recent=6"
SELECTIONS = [f"h2o:{ENDS}", f"momentkv:{ENDS},schedule=paper", f"snapkv:{ENDS}+moments"]
SLOW = [f"adakv:{ENDS}", f"snapkv:{ENDS}", f"scissorhands:{ENDS}", f"momentkv:{ENDS}", f"kvzip:{ENDS},layers=uniform"]


@pytest.mark.parametrize("spec", [*SELECTIONS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW)])
def test_a_budget_of_a_window_loses_nothing(spec):
    """Whatever scores say: with room for sinks and a window, answers are the full cache's."""
    tokens = prompts(2, 100)
    own, exact = (logits_through_a_cache(parse_method(x), model(SLIDING), tokens, prompt=60, capacity=112)
                  for x in (spec, "full"))
    np.testing.assert_allclose(own, exact, atol=2e-4)


@pytest.mark.parametrize("promise", [bytes_are_foretold, saves_are_restored, forks_are_copies])
def test_moments_of_some_layers_are_saved_and_restored(promise):
    promise(parse_method("snapkv:budget=24,sinks=4,recent=8+moments"), WINDOWED)


def test_moments_of_some_layers_are_counted_in_some():
    config = dataclasses.replace(PLAIN, num_layers=8, windows=(12, None) * 4)
    method = parse_method("snapkv:budget_bytes=40000,sinks=2,recent=4+moments")
    assert 35000 < cache_bytes(abstract_cache(method, make_layout(config, 1, 100, 140, 8, jnp.float32))).total <= 40000


def test_votes_of_a_prompt_end_at_the_window():
    """Votes of all queries and of the last ones, against softmax over what each query sees."""
    rng, size, window = np.random.default_rng(0), 90, 7
    q, k = (rng.normal(size=(1, size, heads, 8)).astype(np.float32) for heads in (4, 2))
    lengths, rule = jnp.array([size]), {"scale": 0.4, "sliding": window}
    logits = np.einsum("tkgd,skd->kgts", q[0].reshape(size, 2, 2, 8), k[0]) * 0.4
    at = np.arange(size)
    seen = (at <= at[:, None]) & (at > at[:, None] - window)
    p = np.where(seen, np.exp(logits), 0)
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(prompt_votes(q, k, lengths, total_attention, **rule)[0], p.sum((1, 2)), atol=1e-4)
    often = (p.mean(1) > 1 / np.minimum(at + 1, window)[:, None]).sum(1)
    np.testing.assert_array_equal(prompt_votes(q, k, lengths, above_average, **rule)[0], often)
    np.testing.assert_allclose(window_attention(q, k, lengths, 5, **rule)[0], p[:, :, -5:].sum((1, 2)), atol=1e-5)
