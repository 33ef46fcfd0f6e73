"""What the contract promises on tiny models, on a real one: minutes of compute, run by hand with `-m slow`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import exact_configuration

from lowrank_kv_jax.calibration.calibrate import fit_bases, moments_for
from lowrank_kv_jax.calibration.corpus import load_corpus, token_windows
from lowrank_kv_jax.calibration.layer_votes import collect_votes
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.models.load import load_model
from lowrank_kv_jax.selections.layer_shares import layer_shares

PROMPT, STEPS, BLOCK = 512, 64, 32
LOGITS = 1e-4  # they reach 40; float32 itself moves those of the full cache by 7e-5 from a float64 run of the model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real model")]


@functools.cache
def setting():
    """The model, a prompt of prose, and moments of other text."""
    model = load_model("smollm2-135m", "float32")
    prompt = token_windows(model.tokenizer, load_corpus("pydoc").texts, PROMPT, 1, 7)
    calibration = token_windows(model.tokenizer, load_corpus("pydoc").texts, 512, 2, 0)
    return model, jnp.asarray(prompt), moments_for(model, [REGISTRY["kvzip"]()], np.asarray(calibration))


def decode(method, bases, follow=None):
    """Logits `[1 + STEPS, V]` and the greedy tokens, or those of `follow` if given."""
    model, prompt, _ = setting()
    step = functools.partial(extend, method, model.config, model.params, bases=bases)
    cache, logits = prefill(
        method, model.config, model.params, prompt, bases=bases, capacity=PROMPT + STEPS, block=BLOCK, dtype=jnp.float32
    )
    seen, tokens = [logits[0]], []
    for i in range(STEPS):
        if i and i % BLOCK == 0:
            cache = refresh(method, cache, bases=bases)
        tokens.append(int(seen[-1].argmax()) if follow is None else follow[i])
        cache, logits = step(cache, jnp.asarray([[tokens[-1]]], jnp.int32))
        seen.append(logits[0])
    return np.stack(seen), tokens


@functools.cache
def exact():
    return decode(REGISTRY["full"](), None)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_full_rank_and_budget_give_the_logits_and_greedy_tokens_of_the_full_cache(name):
    model, _, moments = setting()
    method = exact_configuration(REGISTRY[name])
    with jax.default_matmul_precision("highest"):
        bases = fit_bases(model, method, moments, "float32") if method.calibrated else None
        logits, _ = decode(method, bases, follow=exact()[1])
    np.testing.assert_allclose(logits, exact()[0], atol=LOGITS, rtol=0)
    np.testing.assert_array_equal(logits[:-1].argmax(-1), exact()[1])


def test_layers_get_much_the_same_shares_of_prose_and_of_source_code():
    """What kvzip fits to one text holds for another, although layers differ by an order of magnitude."""
    model, _, moments = setting()
    code = token_windows(model.tokenizer, load_corpus("python").texts, 512, 2, 0)
    prose, code = (
        np.array([entry.share for entry in layer_shares(votes, 0.125)])
        for votes in (moments.votes, collect_votes(model, np.asarray(code)))
    )
    assert np.minimum(prose, code).sum() > 0.9 * max(prose.sum(), code.sum()) and prose.max() > 10 * prose.min()
