"""Tiny models beside that of `lowrank_kv_jax.testing`, whose names are here too, and one group of layers as programs."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.attention.partial import AttnPartial
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method import Layout, Place
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.segments.coded import Coded, transport
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.testing import exact_configuration as exact_configuration
from lowrank_kv_jax.testing import small_configuration as small_configuration
from lowrank_kv_jax.testing.models import BLOCK as BLOCK
from lowrank_kv_jax.testing.models import CAPACITY as CAPACITY
from lowrank_kv_jax.testing.models import PLAIN as PLAIN
from lowrank_kv_jax.testing.models import PROMPT as PROMPT
from lowrank_kv_jax.testing.models import Model as Model
from lowrank_kv_jax.testing.models import model as model
from lowrank_kv_jax.testing.models import prompts as prompts
from lowrank_kv_jax.testing.moments import bases_for as bases_for
from lowrank_kv_jax.testing.moments import random_moments as random_moments
from lowrank_kv_jax.testing.stepwise import run as run

QWEN = dataclasses.replace(
    PLAIN,
    family="qwen3",
    num_layers=2,
    windows=(None, None),
    head_dim=12,
    qk_norm=True,
    tie_embeddings=True,
    rope=RopeSpec(10000.0, 12, "llama3", 4.0, 1.0, 4.0, 64),
)
WINDOWED = dataclasses.replace(PLAIN, family="mistral", num_layers=2, windows=(24, None), qkv_bias=True)


# Verbatim, in bits, packed by head, low rank, across layers: what is asked of whole models is asked of the others under -m slow.
REPRESENTATIVES = {"full", "kivi", "momentkv", "ojakv", "xkv"}


def methods(elsewhere: Collection[str] = (), slow: bool = True):
    """Names of all registered methods as parameters. One worker runs all tests of a method: they share its programs.

    Args:
        elsewhere: representatives of which another test asks the same.
        slow: mark these, and those that no representative is.
    """
    for name in sorted(REGISTRY):
        marks = [pytest.mark.xdist_group(name)]
        quick = not slow or name in REPRESENTATIVES.difference(elsewhere)
        yield pytest.param(name, marks=marks if quick else [*marks, pytest.mark.slow])


# ---- one group of layers, each call one program: operation by operation, every one of them would be compiled -------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def compress(machine: Any, layout: Layout, bases: Any, taps: tuple[Taps, ...], lengths: jax.Array) -> Any:
    return machine.compress(layout, bases, machine.init(layout, bases), taps, lengths)


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(machine: Any, layout: Layout, bases: Any, state: Any, q: jax.Array, positions: jax.Array) -> Any:
    return machine.attend(layout, bases, state, q, positions, Place())


@functools.partial(jax.jit, static_argnums=(0, 1))
def rebuilt(method: Any, layout: Layout, bases: Any, store: Any) -> Any:
    return method.rebuilt(layout, bases, store)


def logits_through_a_cache(method, model, tokens, bases=None, prompt=40, capacity=64, block=10):
    """Logits `[B, S - prompt + 1, V]` from the prompt's last token on: the rest comes in blocks, each with a refresh."""
    config, params = model.config, model.params
    options = {"bases": bases, "capacity": capacity, "block": block, "dtype": jnp.float32}
    cache, logits = prefill(method, config, params, tokens[:, :prompt], **options)
    out = [logits[:, None]]
    for begin in range(prompt, tokens.shape[1], block):
        cache, logits = extend(
            method, config, params, cache, tokens[:, begin : begin + block], bases=bases, all_logits=True
        )
        cache = refresh(method, cache, bases=bases)
        out.append(logits)
    return np.concatenate(out, axis=1)


def empty_partial(batch, queries, q_heads, head_dim):
    """Of no tokens: the neutral element of `merge`."""
    shape = (batch, queries, q_heads)
    return AttnPartial(jnp.zeros((*shape, head_dim), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32))


def softmax_attention(q, k, v, mask, scale):
    """float64 out and lse, 0 and -inf where nothing is seen.

    q `[B, T, N, D]`, k and v `[B, S, K, D]`, mask `[B, T, S]`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) * scale
    scores = np.where(np.asarray(mask)[:, None], scores, -np.inf)
    top = np.max(scores, axis=-1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top)[..., None])
    total = weights.sum(-1)
    out = (
        np.einsum("bnts,bsnd->btnd", weights, v) / np.where(total == 0, 1.0, total).swapaxes(1, 2)[..., None]
    )
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + np.where(np.isneginf(top), 0.0, top)).swapaxes(1, 2)


def transported(coefficients, lengths, old, new):
    """`segments.coded.transport` of coefficients alone."""
    runs = Runs(jnp.zeros((len(lengths), 2), jnp.int32), jnp.zeros((len(lengths), 2), jnp.int32))
    return transport(Coded(coefficients, coefficients, lengths, runs), "k", old, new)
