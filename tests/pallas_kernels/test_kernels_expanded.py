"""Attended coefficients expanded and merged with exact tokens by the Triton kernel, interpreted, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.pallas_kernels import gpu_merge
from lowrank_kv_jax.pallas_kernels.dispatch import Unsupported
from lowrank_kv_jax.pallas_kernels.expanded_values import gpu_triton
from lowrank_kv_jax.pallas_kernels.packing import EMPTY
from lowrank_kv_jax.storage.backend import OVERRIDE
from lowrank_kv_jax.storage.basis import Scaled
from lowrank_kv_jax.storage.cached_tokens import Beside, CachedTokens
from lowrank_kv_jax.storage.eight_bits import eight_bits_of
from lowrank_kv_jax.storage.positions import Runs

SCALE, SLOTS = 0.3, 90
LENGTHS = np.array([0, 1, 70, SLOTS], np.int32)
ROWS = len(LENGTHS)


def attended(q, keys, values, lengths):
    """Out `[B, N, D]` and log-sum-exp of queries `[B, N, D]` over the first tokens of `[B, N, S, D]`."""
    logits = np.einsum("bnd,bnsd->bns", q, keys) * SCALE
    weights = np.where(np.arange(keys.shape[2]) < lengths[:, None, None], np.exp(logits), 0)
    total = weights.sum(-1)
    out = np.einsum("bns,bnsd->bnd", weights, values) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total)


def merged(out, lse):
    """Of parts side by side, `[n, B, N, D]`."""
    weights = np.exp(lse)
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        return (weights[..., None] * out).sum(0) / np.where(total == 0, 1, total)[..., None], np.log(total)


def tail(rng, q, heads, dim, held):
    """Exact tokens of each row, NaN beyond them, and what is attended of them."""
    keys, values = (rng.normal(size=(ROWS, heads, SLOTS, dim)).astype(np.float32) for _ in range(2))
    there = (np.arange(SLOTS) < LENGTHS[:, None])[:, None, :, None]
    kept = [held(jnp.asarray(np.where(there, x, 0 if held is eight else np.nan))) for x in (keys, values)]
    none = jnp.zeros((ROWS, 2), jnp.int32)
    tokens = CachedTokens(*kept, jnp.asarray(LENGTHS), Runs(none, none))
    seen = [np.asarray(x.widened() if hasattr(x, "widened") else x, np.float64) for x in kept]
    each = q.shape[2] // heads
    found = attended(np.asarray(q[:, 0], np.float64), *(np.repeat(np.nan_to_num(x), each, axis=1) for x in seen), LENGTHS)
    return Beside(q, tokens, jnp.full((ROWS, 1), SLOTS), False), found


def as_it_is(x):
    return x


def eight(x):
    return eight_bits_of(x, jnp.float32).filled(x)


@pytest.mark.parametrize("heads, each, dim, rank, shared, held, dtype", [
    pytest.param(2, 3, 24, 20, 1, as_it_is, "float32", marks=pytest.mark.newest),  # a basis for each head
    (4, 1, 80, 130, 4, as_it_is, "float32"),  # one for all, channels and components beyond whole pieces
    (2, 4, 64, 64, 2, eight, "float32"), (2, 4, 80, 64, 2, eight, "bfloat16"),
])
@pytest.mark.parametrize("factors, per_row, centred", [(False, True, False), (True, False, True), (True, True, True)])
def test_values_are_expanded_beside_exact_tokens(
    heads, each, dim, rank, shared, held, dtype, factors, per_row, centred, monkeypatch
):
    """Of four rows one has no exact token, and another nothing that is stored. Some are more than are read beside."""
    if factors and per_row:
        monkeypatch.setattr(gpu_triton, "FEW_SLOTS", SLOTS - 1)
        monkeypatch.setenv(OVERRIDE, "triton")
    rng = np.random.default_rng(dim)
    groups, width = heads // shared, shared * dim
    q = jnp.asarray(rng.normal(size=(ROWS, 1, heads * each, dim)), dtype)
    out = rng.normal(size=(ROWS, 1, heads * each, rank)).astype(np.float32)
    lse = rng.normal(size=(ROWS, 1, heads * each)).astype(np.float32) + 2
    out[2], lse[2] = 0, -np.inf
    beside, exact = tail(rng, q, heads, dim, held)
    basis = rng.normal(size=(*[ROWS] * (per_row and not factors), groups, width, rank)).astype(np.float32) / rank**0.5
    whole, given = basis.astype(np.float64), jnp.asarray(basis)
    if factors:
        columns = rng.random((*[ROWS] * per_row, groups, rank)).astype(np.float32)
        rows = None if per_row else rng.random((groups, width)).astype(np.float32)
        given = Scaled(given, None if rows is None else jnp.asarray(1 / rows), (jnp.asarray(columns), jnp.ones(rank)))
        whole = whole * columns[..., None, :].astype(np.float64) * (1 if rows is None else rows[..., None])
    mean = rng.normal(size=(heads, dim)).astype(np.float32) if centred else None
    found = gpu_triton.expanded_values(
        given, AttnPartial(jnp.asarray(out), jnp.asarray(lse)), heads, None if mean is None else jnp.asarray(mean), beside,
        scale=SCALE, cap=None, interpret=True)
    by_head = np.broadcast_to(whole, (ROWS, groups, width, rank)).reshape(ROWS, heads, dim, rank)
    expanded = np.einsum("bnr,bndr->bnd", out[:, 0].astype(np.float64), np.repeat(by_head, each, axis=1))
    expanded = expanded + (0 if mean is None else np.repeat(mean, each, axis=0))
    wanted, total = merged(np.stack([expanded, exact[0]]), np.stack([lse[:, 0], exact[1]]))
    tolerance = 3e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found.out[:, 0], wanted, atol=tolerance)
    np.testing.assert_allclose(found.lse[:, 0], total, atol=tolerance)


def test_nothing_at_all_is_zero():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(ROWS, 1, 2, 16)), jnp.float32)
    beside, _ = tail(rng, q, 1, 16, as_it_is)
    none = AttnPartial(jnp.zeros((ROWS, 1, 2, 8)), jnp.full((ROWS, 1, 2), -jnp.inf))
    found = gpu_triton.expanded_values(
        jnp.ones((1, 16, 8)), none, 1, jnp.ones((1, 16)), beside, scale=SCALE, cap=None, interpret=True)
    assert not np.asarray(found.out[0]).any() and np.isneginf(np.asarray(found.lse[0])).all()


def test_what_it_does_not_read_is_refused():
    q = jnp.zeros((ROWS, 2, 2, 16), jnp.float32)
    beside, _ = tail(np.random.default_rng(0), q, 1, 16, as_it_is)
    part = AttnPartial(jnp.zeros((ROWS, 2, 2, 8)), jnp.zeros((ROWS, 2, 2)))
    with pytest.raises(Unsupported, match="more than a query"):
        gpu_triton.expanded_values(jnp.ones((1, 16, 8)), part, 1, None, beside, scale=SCALE, cap=None, interpret=True)


@pytest.mark.parametrize("splits, width", [pytest.param(33, 48, marks=pytest.mark.newest), (2, 200), (1, 16)])
def test_splits_are_merged(splits, width):
    rng = np.random.default_rng(splits)
    out, lse = rng.normal(size=(2, 3, splits, 4, width)), rng.normal(size=(2, 3, 4, splits))
    if splits > 1:
        out[:, :, 1], lse[..., 1] = 0, EMPTY
        out[0, 0], lse[0, 0] = 0, EMPTY
    found = gpu_merge.merge_splits(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32), interpret=True)
    some, total = merged(np.moveaxis(out, 2, 0), np.moveaxis(np.where(lse <= EMPTY / 2, -np.inf, lse), 3, 0))
    np.testing.assert_allclose(found.out, some, atol=1e-5)
    np.testing.assert_allclose(found.lse, total, atol=1e-5)
