"""Directions with magnitudes of two layers, as the Triton kernel reads them, interpreted, against float64."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.scaled_tokens import ScaledTokens

SLOTS, DIM, HEADS, EACH, SCALE = 150, 24, 2, 3, 0.4
LENGTHS = np.array([0, 7, SLOTS], np.int32)
FEW = np.array([5, 0, 20], np.int32)


def numbers(rng, *shape, lengths, dtype="float32"):
    """NaN beyond the valid tokens `[B, J, S, ..]`."""
    x = rng.normal(size=shape)
    there = np.arange(shape[2]) < lengths[:, None]
    return jnp.asarray(np.where(there.reshape(len(lengths), 1, shape[2], *(1,) * (len(shape) - 3)), x, np.nan), dtype)


def attended(q, parts):
    """Of queries `[B, N, D]` and (keys, values, lengths) of every part, keys and values `[B, J, S, D]`."""
    keys, values = (np.concatenate([np.repeat(np.nan_to_num(np.asarray(part[i], np.float64)), EACH, axis=1)
                                    for part in parts], axis=2) for i in range(2))
    there = np.concatenate([np.arange(part[0].shape[2]) < part[2][:, None] for part in parts], axis=1)
    weights = np.where(there[:, None], np.exp(np.einsum("bnd,bnsd->bns", q, keys) * SCALE), 0)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        return np.einsum("bns,bnsd->bnd", weights, values) / np.where(total == 0, 1, total)[..., None], np.log(total)


@pytest.mark.parametrize("layer, beside, dtype", [
    pytest.param(0, True, "float32", marks=pytest.mark.newest), (1, False, "float32"), (1, True, "bfloat16")])
def test_each_token_is_multiplied_by_its_layers_magnitude(layer, beside, dtype):
    """Of rows without a token, few and all; exact tokens are read by the same programs."""
    rng, rows = np.random.default_rng(layer), len(LENGTHS)
    q = jnp.asarray(rng.normal(size=(rows, 1, HEADS * EACH, DIM)), dtype)
    none = jnp.zeros((rows, 2), jnp.int32)
    sides = [ScaledTokens(numbers(rng, rows, HEADS, SLOTS, DIM, lengths=LENGTHS, dtype=dtype),
                          numbers(rng, rows, HEADS, SLOTS, 2, lengths=LENGTHS, dtype=dtype), None, layer) for _ in range(2)]
    parts = [(*(np.asarray(x.direction, np.float64) * np.asarray(x.norm, np.float64)[..., layer, None] for x in sides), LENGTHS)]
    more = None
    if beside:
        exact = [numbers(rng, rows, HEADS, 30, DIM, lengths=FEW, dtype=dtype) for _ in range(2)]
        parts.append((*exact, FEW))
        more = Beside(q, CachedTokens(*exact, jnp.asarray(FEW), Runs(none, none)), jnp.full((rows, 1), SLOTS), False)
    tokens = CachedTokens(*sides, jnp.asarray(LENGTHS), Runs(none, none))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of XLA in its place
        found = coefficient_attention(
            q, tokens, scale=SCALE, q_positions=jnp.full((rows, 1), SLOTS), causal=False, window=None, beside=more,
            backend="triton")
    out, lse = attended(np.asarray(q[:, 0], np.float64), parts)
    tolerance = 3e-2 if dtype == "bfloat16" else 3e-5
    np.testing.assert_allclose(found.out[:, 0], out, atol=tolerance)
    np.testing.assert_allclose(found.lse[:, 0], lse, atol=tolerance)
