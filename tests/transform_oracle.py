"""Transform coding in float64, and tokens to code."""

import jax.numpy as jnp
import numpy as np
from helpers import PLAIN

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.estimators.bit_allocation import STEP
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method.codec import Tokens

SPEC, SIZE = PLAIN.attention, 40
LAYOUT = make_layout(PLAIN, 2, 96, 160, 16, jnp.float32)


def tokens_like(moments, layer=0, seed=0, count=SIZE):
    """Tokens of the distribution that the moments are of: queries, keys before and after RoPE, values."""
    rng, n = np.random.default_rng(seed), moments.tokens

    def draw(tap):
        mean = moments.mean(tap)[layer]
        root = np.linalg.cholesky(np.asarray(getattr(moments, tap)[layer], np.float64) / n - np.outer(mean, mean) + 1e-6 * np.eye(len(mean)))
        x = mean + rng.normal(size=(2, count, len(mean))) @ root.T
        return jnp.asarray(x.reshape(2, count, SPEC.kv_heads, SPEC.head_dim), jnp.float32)

    k_pre, v = draw("k_pre"), draw("v")
    positions = jnp.broadcast_to(jnp.arange(count) + 4, (2, count))
    k = rotate(k_pre, *(x[:, :, None] for x in rope_angles(SPEC.rope, positions)))
    q = jnp.asarray(rng.normal(size=(2, 3, SPEC.q_heads, SPEC.head_dim)), jnp.float32)
    return q, Tokens(k, k_pre, v, positions)


def basis_of(bases, side):
    """U of "k" or "v" in float64."""
    basis, coarse, unit = (getattr(bases, name) for name in (side, f"{side}_coarse", f"{side}_unit"))
    basis = np.asarray(basis, np.float64)
    if unit is None:
        return basis
    if coarse is not None:
        byte = np.asarray(coarse).view(np.uint8)
        codes = np.concatenate([byte % 16, byte // 16], axis=-1).astype(np.float64)
        codes = np.where(codes > 7, codes - 16, codes)
        basis = np.concatenate([basis, 2 * codes + 1], axis=-1)
    unit = np.repeat(np.asarray(unit, np.float64), basis.shape[1] // unit.shape[1], axis=1)
    return basis[..., : unit.shape[-1]] * unit


def around_of(bases, side, means=None):
    """What tokens are coded around `[B or 1, G, K, D]`, by default the calibration's, and the channels' weights."""
    shape, weight = (bases.layers, SPEC.kv_heads, SPEC.head_dim), getattr(bases, f"{side}_weight")
    means = getattr(bases, f"{side}_mean") if means is None else means
    means = np.zeros(shape) if means is None else np.asarray(means, np.float64)
    return means.reshape(-1, *shape), np.ones(shape) if weight is None else np.asarray(weight, np.float64)


def in_basis(bases, side, layers, means=None, count=None):
    """Coefficients `[B, T, J, R]` of tokens `[B, T, K, D]` of every layer, in units of the calibrated deviations.

    Args:
        count: R, of the columns that are read; by default all.
    """
    basis = basis_of(bases, side)[..., :count]
    return least_squares(weighted(bases, side, layers, means), basis, precise(bases, side)) / scale_of(bases, side)[:, :count]


def scale_of(bases, side):
    """Deviations `[J, R]` of the coefficients that a side is read from."""
    return np.asarray(bases.k_scale if bases.v_scale is None else getattr(bases, f"{side}_scale"), np.float64)


def weighted(bases, side, layers, means=None):
    """Channels of tokens without their mean as they are coded, `[B, T, J, W]`, layer by layer."""
    means, weight = around_of(bases, side, means)
    return np.concatenate([((np.asarray(x, np.float64) - m[:, None]) * w).reshape(*x.shape[:2], len(basis_of(bases, side)), -1)
                           for x, m, w in zip(layers, means.swapaxes(0, 1), weight, strict=True)], axis=-1)


def precise(bases, side):
    """Columns whose directions have 8 bits."""
    return getattr(bases, side).shape[-1]


def least_squares(x, basis, first):
    """Coefficients `[B, T, J, R]` in directions `[J, W, R]` that are next to orthonormal: one step from products, of so
    many first ones, and of the others in what those leave."""
    found = []
    for own in (basis[..., :first], basis[..., first:]):
        code = np.einsum("btjw,jwr->btjr", x, own)
        code = code + np.einsum("btjw,jwr->btjr", x - np.einsum("btjr,jwr->btjw", code, own), own)
        x = x - np.einsum("btjr,jwr->btjw", code, own)
        found.append(code)
    return np.concatenate(found, axis=-1)


def oracle(bases, side, layers, runs, means=None, ratios=None):
    """What each layer of a group reads of tokens `[B, T, K, D]` of every layer.

    Args:
        means: of each row `[B, G, K, D]`.
        ratios: of each row's steps to the calibrated ones `[B, J, R]`.
    """
    count = sum(count for _, count in runs)
    return read(bases, side, rounded(in_basis(bases, side, layers, means, count), runs, ratios), means)


def oracle_of_both(bases, keys, values, runs, means=(None, None), ratios=None):
    """The same of keys and of values that are one code: what each layer reads of both."""
    count = sum(count for _, count in runs)
    x = np.concatenate([weighted(bases, *own) for own in zip("kv", (keys, values), means, strict=True)], axis=-1)
    basis = np.concatenate([basis_of(bases, side)[..., :count] for side in "kv"], axis=1)
    codes = rounded(least_squares(x, basis, precise(bases, "k")) / scale_of(bases, "k")[:, :count], runs, ratios)
    return [read(bases, side, codes, own) for side, own in zip("kv", means, strict=True)]


def rounded(c, runs, ratios=None):
    """Coefficients `[B, T, J, R]` in units of the calibrated deviations as their codes have them."""
    bits = np.concatenate([np.full(count, bits) for bits, count in runs])
    step = np.array([24 / 256 if own == 8 and i < 2 else STEP[own] for i, own in enumerate(bits)])
    step = step * (1.0 if ratios is None else np.asarray(ratios, np.float64)[:, None])
    half = 2.0 ** (bits - 1)
    return (np.clip(np.floor(c / step), -half, half - 1) + 0.5) * step


def read(bases, side, codes, means=None):
    """Tokens `[B, T, K, D]` of every layer from codes `[B, T, J, R]` in units of the calibrated deviations."""
    count = codes.shape[-1]
    out = np.einsum("btjr,jwr->btjw", codes * scale_of(bases, side)[:, :count], basis_of(bases, side)[..., :count])
    means, weight = around_of(bases, side, means)
    parts = np.split(out, bases.layers, axis=-1)
    return [part.reshape(*part.shape[:2], *w.shape) / w + m[:, None]
            for part, m, w in zip(parts, means.swapaxes(0, 1), weight, strict=True)]


def ratios_of(bases, side, layers, runs, weight, means=None):
    """Steps of each row in units of the calibrated ones `[B, J, R]`, of tokens that count by `weight` `[B, T]`."""
    bits, weight = np.concatenate([np.full(count, bits) for bits, count in runs]), np.asarray(weight, np.float64)
    squares = np.einsum("bt,btjr->bjr", weight, in_basis(bases, side, layers, means, len(bits)) ** 2)
    ratios = np.sqrt((32 + squares) / (32 + weight.sum(1))[:, None, None])
    return np.where(bits == 8, 1.0, np.clip(ratios, 0.25, 4.0))
