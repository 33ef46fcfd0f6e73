"""The full cache, step by step, against transformers' logits; and every other method at full rank against it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import CONFIGS, PREFILL
from test_models import GOLDENS, smollm2, tiny_goldens, tiny_params  # noqa: F401

from lowrank_kv_jax import models
from lowrank_kv_jax.generation.forward import decode_step, prefill, refresh
from lowrank_kv_jax.generation.generate import generate
from lowrank_kv_jax.methods import Full

ALIKE = {"llama2_tied", "llama2_mha_bias", "qwen3_untied"}  # other families' parts, put together otherwise


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.slow] if family in ALIKE else []) for family in CONFIGS])
def test_steps_through_the_cache_give_the_logits_of_transformers(family):
    """Prefill to `PREFILL`, then one token at a time; for the scaled families beyond their original context."""
    config, golden = models.read_config(CONFIGS[family]), tiny_goldens()
    params, method = tiny_params(config), Full()
    tokens, expected = jnp.asarray(golden[f"{family}/tokens"]), golden[f"{family}/logits"]
    cache, logits = prefill(
        method, config, params, tokens[:, :PREFILL], capacity=tokens.shape[1], block=8, dtype=jnp.float32
    )
    seen = [logits]
    for position in range(PREFILL, tokens.shape[1]):
        cache, logits = decode_step(method, config, params, cache, tokens[:, position])
        seen.append(logits)
        if int(cache.pending) == cache.layout.block:
            cache = refresh(method, cache)
    np.testing.assert_allclose(np.stack(seen, axis=1), expected[:, PREFILL - 1 :], atol=1e-4, rtol=0)


def test_likeliest_tokens_of_smollm2_are_those_of_transformers(smollm2):  # noqa: F811
    """Of a short prompt, and token by token to two behind a refresh; greedy ones, behind all of it, under -m slow."""
    golden, method, begin, end, block = np.load(GOLDENS / "smollm2.npz"), Full(), 64, 70, 4
    text, found = golden["tokens"][None], []
    with jax.default_matmul_precision("highest"):
        cache, logits = prefill(
            method, smollm2.config, smollm2.params, text[:, :begin], capacity=end, block=block, dtype=jnp.float32
        )
        for at in range(begin, end):
            if at == begin + block:
                cache = refresh(method, cache)
            found.append(int(np.asarray(logits)[0].argmax()))
            cache, logits = decode_step(method, smollm2.config, smollm2.params, cache, text[:, at])
    assert [*found, int(np.asarray(logits)[0].argmax())] == golden["argmax"][begin - 1 : end].tolist()


@pytest.mark.slow
def test_greedy_generation_of_smollm2_is_that_of_transformers(smollm2):  # noqa: F811
    golden = np.load(GOLDENS / "smollm2.npz")
    with jax.default_matmul_precision("highest"):
        out = generate(
            smollm2, Full(), [golden["tokens"].tolist()], max_new_tokens=64, dtype=jnp.float32, stop_at_eos=False
        )
    assert out.tokens[0] == golden["greedy"].tolist()
