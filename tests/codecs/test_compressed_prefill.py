"""`prefill=compressed`: a prompt attends to what its tokens are coded as, layer after layer."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, PLAIN, PROMPT, WINDOWED, bases_for, model, prompts

from lowrank_kv_jax.evals.asking.prefill_many import prefill_many
from lowrank_kv_jax.generation.forward import decode_step, prefill
from lowrank_kv_jax.generation.layer_cache import plan_layers
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.serving.filling import prefill_rows
from lowrank_kv_jax.serving.rows import empty_cache

LENGTHS = jnp.array([PROMPT, 41])
BARE = "palu:mean=false,sinks=0,recent=0,head_group=2"


def prefilled(spec, config, rank=None, params=None, **arguments):
    method = parse_method(spec if rank is None else f"{spec},rank={rank}")
    bases = bases_for(method, config) if method.calibrated else None
    params = model(config).params if params is None else params
    return method, bases, *prefill(method, config, params, prompts()[:2, :PROMPT], LENGTHS, bases=bases, capacity=CAPACITY,
                                   dtype=jnp.float32, **arguments)


@pytest.mark.parametrize("spec", [
    pytest.param("palu:sinks=2,recent=4", marks=pytest.mark.slow),
    pytest.param("streamingkv:sinks=0,recent=0", marks=pytest.mark.slow), "ojakv:rope=post,sinks=3,recent=5",
    pytest.param("streamingkv:sinks=2,recent=4+kvzip:keep=1.0", marks=pytest.mark.slow)])
def test_it_is_exact_at_full_rank(spec):
    head, *rest = spec.split("+")
    _, _, _, exact = prefilled("full", WINDOWED)
    _, _, _, logits = prefilled("+".join([f"{head},rank=1.0,prefill=compressed", *rest]), WINDOWED)
    np.testing.assert_allclose(logits, exact, atol=2e-4)


def test_it_is_the_model_whose_projections_are_replaced():
    """W V V^T in the place of W_k and W_v (Palu, equation 2), with exact attention to what they give."""
    spec = f"{BARE},rank=0.4,prefill=compressed"
    _, bases, _, logits = prefilled(spec, PLAIN)
    params = copy.deepcopy(jax.tree.map(np.asarray, model(PLAIN).params))
    for layer, own in zip(params["layers"], bases, strict=True):
        for name, basis in (("k_proj", own.k), ("v_proj", own.v)):
            within = jax.scipy.linalg.block_diag(*(u @ u.T for u in np.asarray(basis)))
            layer["attention"][name]["kernel"] = layer["attention"][name]["kernel"] @ np.asarray(within)
    _, _, _, replaced = prefilled("full", PLAIN, params=params)
    np.testing.assert_allclose(logits, replaced, atol=2e-4)
    assert np.abs(np.asarray(logits - prefilled("full", PLAIN)[3])).max() > 0.05


def test_decoding_goes_on_and_every_way_to_prefill_is_the_same():
    spec, config = f"{BARE},rank=0.4,prefill=compressed", PLAIN
    method, bases, cache, logits = prefilled(spec, config)
    many, found = prefill_many(
        {"exact": parse_method("full"), "coded": method}, config, model(config).params, prompts()[:2, :PROMPT], LENGTHS,
        bases={"coded": bases}, capacity=CAPACITY, dtype=jnp.float32)
    np.testing.assert_allclose(found["coded"], logits, atol=1e-5)
    np.testing.assert_allclose(found["exact"], prefilled("full", config)[3], atol=1e-5)
    rows, served = prefill_rows(
        method, config, model(config).params, empty_cache(method, cache.layout, bases, 1), jnp.arange(2), prompts()[:2, :PROMPT],
        LENGTHS, bases=bases)
    np.testing.assert_allclose(served, logits, atol=1e-5)
    token = jnp.array([1, 2], jnp.int32)
    answers = [decode_step(method, config, model(config).params, one, token, bases=bases)[1]
               for one in (cache, many["coded"], rows)]
    assert np.isfinite(answers[0]).all()
    for other in answers[1:]:
        np.testing.assert_allclose(other, answers[0], atol=1e-5)


def test_what_it_cannot_do_it_says():
    with pytest.raises(ValueError, match="prefill='half': allowed are exact, compressed"):
        parse_method("palu:prefill=half")
    with pytest.raises(ValueError, match="prefill='compressed': a decoder of one's own"):
        plan_layers("palu:prefill=compressed", PLAIN.attention, prompt=8, capacity=16)
