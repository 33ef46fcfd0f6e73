"""Selections in layers with a sliding window: what no later query sees takes no place of the budget."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, logits_through_a_cache, model, prompts

from lowrank_kv_jax.attention.importance import window_attention
from lowrank_kv_jax.method.votes import above_average, prompt_votes, total_attention
from lowrank_kv_jax.methods.parse import parse_method

WINDOW, SINKS = 24, 3
SLIDING = dataclasses.replace(PLAIN, num_layers=2, windows=(WINDOW, WINDOW))
ENDS = f"budget={SINKS + WINDOW},sinks={SINKS},recent=6"
SELECTIONS = [f"h2o:{ENDS}", f"adakv:{ENDS}", f"momentkv:{ENDS},schedule=paper", f"snapkv:{ENDS}+moments"]
SLOW = [f"snapkv:{ENDS}", f"scissorhands:{ENDS}", f"momentkv:{ENDS}", f"kvzip:{ENDS},layers=uniform"]


@pytest.mark.parametrize("spec", [*SELECTIONS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SLOW)])
def test_a_budget_of_a_window_loses_nothing(spec):
    """Whatever scores say: with room for sinks and a window, answers are the full cache's."""
    tokens = prompts(2, 100)
    own, exact = (logits_through_a_cache(parse_method(x), model(SLIDING), tokens, prompt=60, capacity=112)
                  for x in (spec, "full"))
    np.testing.assert_allclose(own, exact, atol=2e-4)


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
