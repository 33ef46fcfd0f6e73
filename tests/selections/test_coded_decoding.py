"""`decoding=code`: the prompt is chosen from once, and what comes later is coded and stays."""

import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracle import kept_positions
from helpers import PLAIN, PROMPT, model, prompts, run

from lowrank_kv_jax.generation.forward import decode_step, prefill, refresh
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.testing import PROMISES
from lowrank_kv_jax.testing.moments import bases_for

STEPS, BLOCK = 24, 8
SPECS = [  # slots of heads packed in one buffer, one buffer for all heads, and one a head
    "static-pca:rank=1.0,sinks=4,recent=8+adakv:keep=0.5,recent=8,decoding=code",
    "transform:bits=4,sinks=4,recent=8+kvzip:keep=0.5,decoding=code",
    "kivi:bits=8+snapkv:keep=0.5,recent=8,decoding=code+moments",
]


@pytest.mark.parametrize("spec", [SPECS[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in SPECS[1:])])
def test_it_keeps_every_promise(spec):
    for promise in PROMISES:
        promise(parse_method(spec), PLAIN, (PROMPT, 70))


@pytest.mark.parametrize("rule", ["snapkv:keep=0.5,recent=8", "adakv:keep=0.5,recent=8"])
def test_exact_codes_make_it_what_decoding_keep_is(rule):
    tokens = prompts(length=PROMPT + STEPS)
    kept, coded = (run(parse_method(f"{rule},decoding={decoding}"), PLAIN, tokens, PROMPT, width=4)[1]
                   for decoding in ("keep", "code"))
    np.testing.assert_allclose(coded, kept, atol=1e-5)


def test_later_tokens_join_those_that_were_chosen_and_take_less_room():
    rule = "kivi:bits=4+snapkv:keep=0.5,recent=8,decoding="
    method = parse_method(rule + "code")
    cache, logits = prefill(
        method, PLAIN, model(PLAIN).params, prompts(), jnp.array([PROMPT, 70]), capacity=PROMPT + STEPS, block=BLOCK,
        dtype=jnp.float32,
    )
    chosen = kept_positions(cache.groups[0])
    for step in range(STEPS):
        if step and step % BLOCK == 0:
            cache = refresh(method, cache)
        cache, logits = decode_step(method, PLAIN, model(PLAIN).params, cache, logits.argmax(-1).astype(jnp.int32))
    assert np.isfinite(np.asarray(logits)).all()
    row = refresh(method, fork(cache)).groups[0]
    for before, after in zip(chosen, kept_positions(row), strict=True):
        assert list(after[: len(before)]) == list(before)
        later = np.asarray(after[len(before):])
        np.testing.assert_array_equal(later, np.arange(later[0], later[0] + len(later)))
        assert later[-1] == PROMPT + STEPS - 8 - 1  # all but the recent ones
    wide, narrow = (cache_bytes(prefill(parse_method(rule + one), PLAIN, model(PLAIN).params, prompts(), capacity=PROMPT + 256,
                                        block=BLOCK)[0]).total for one in ("keep", "code"))
    assert narrow < wide


def test_a_cache_says_where_it_is_full():
    method, bases = parse_method(SPECS[0]), None
    bases = bases_for(method, PLAIN)
    cache, logits = prefill(method, PLAIN, model(PLAIN).params, prompts(), capacity=PROMPT + BLOCK, block=BLOCK, bases=bases)
    for step in range(BLOCK + 1):
        if step == BLOCK:
            cache = refresh(method, cache, bases=bases)
        assert np.isfinite(np.asarray(logits, np.float32)).all()
        cache, logits = decode_step(method, PLAIN, model(PLAIN).params, cache, logits.argmax(-1).astype(jnp.int32), bases=bases)
    assert np.isnan(np.asarray(logits, np.float32)).all()
