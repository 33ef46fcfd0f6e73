"""Tiny models, and configurations of any registered method, for the tests."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.codecs.layer_groups import stride_groups
from lowrank_kv_jax.estimators.moments import Across, Fisher, Moments, Sensitivity, head_blocks
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method import Layout, Part, Place
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.segments.coded import Coded, transport
from lowrank_kv_jax.storage.positions import Runs

PLAIN = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    q_heads=8,
    kv_heads=4,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0, 8),
    context=512,
    windows=(None, None, None),
)
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

PROMPT, CAPACITY, BLOCK = 96, 160, 16


# Of each kind of state one: what is asked of whole models is asked of the others under -m slow.
REPRESENTATIVES = {"full", "kivi", "momentkv", "ojakv", "osp", "streamingkv", "xkv"}


def methods(slow: bool = True):
    """Names of all registered methods as parameters. One worker runs all tests of a method: they share its programs.

    Args:
        slow: mark those that no representative is.
    """
    for name in sorted(REGISTRY):
        marks = [pytest.mark.xdist_group(name)]
        yield pytest.param(name, marks=[*marks, pytest.mark.slow] if slow and name not in REPRESENTATIVES else marks)


class Model(NamedTuple):
    """What `generate` reads of a model."""

    config: ModelConfig
    params: Any
    tokenizer: Any = None


@functools.cache
def model(config: ModelConfig = PLAIN) -> Model:
    return Model(config, init_params(config, jax.random.key(0)))


def prompts(rows: int = 2, length: int = PROMPT, seed: int = 0, vocab: int = PLAIN.vocab_size) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (rows, length)), jnp.int32)


def random_moments(
    config: ModelConfig, seed: int = 0, *, means: bool = False, fisher: bool = False, group: int = 1
) -> Moments:
    """Moments of anisotropic random activations.

    Args:
        group: layers whose activations are correlated, and of which `Moments.across` is given.
        means: of activations around a random mean, whose sums are given too.
        fisher: Fisher information is given too, a different one for each matrix.
    """
    spec, rng = config.attention, np.random.default_rng(seed)
    sums = []

    def moment(*lead, width):
        x = rng.normal(size=(*lead, 64, width)) * np.linspace(2.0, 0.2, width)
        if means:
            x = x + rng.normal(size=(*lead, 1, width))
            sums.append(x.sum(-2).astype(np.float32))
        return (np.swapaxes(x, -1, -2) @ x).astype(np.float32)

    layers, kv, dim = spec.num_layers, spec.kv_heads, spec.head_dim
    k, k_pre, v = (moment(layers, width=kv * dim) for _ in range(3))
    q, q_pre = (moment(layers, kv, width=dim) for _ in range(2))
    votes = np.sort(rng.random((layers, 61)) ** 2)[:, ::-1]  # the share of a layer's votes above rising edges
    information = None
    if fisher:
        weight, eye = rng.uniform(0.5, 2.0, (2, layers, 1, 1)), np.eye(kv * dim)
        information = Fisher(weight[0] * eye, weight[1] * eye, 1)
    squares = rng.uniform(0.1, 2.0, (3, layers, 1, 1)) * np.linspace(0.2, 2.0, dim) * np.ones((kv, 1))
    of_layers = Moments(64, k, k_pre, v, q, q_pre, *sums[:3], fisher=information, votes=votes,
                        sensitivity=Sensitivity(*squares))
    moments = of_layers if group == 1 else _across_layers(of_layers, rng, group)
    return moments._replace(sampled=moments)  # a model that writes what it reads: all means stay what they are


def _across_layers(moments: Moments, rng, group: int) -> Moments:
    """The same with keys and values that the layers of a group mostly share."""
    layers, width = moments.k.shape[:2]
    groups, new = stride_groups(layers, group), {}
    across = {own: {} for own in groups if len(own) > 1}
    for name in Across._fields:
        diagonal = []
        for own in groups:
            shared = rng.normal(size=(64, 1, width)) * np.linspace(2.0, 0.2, width)
            x = (shared + 0.3 * rng.normal(size=(64, len(own), width)) + moments.mean(name)[list(own)]).reshape(64, -1)
            if len(own) > 1:
                across[own][name] = x.T @ x
            diagonal.append(head_blocks((x.T @ x)[None], len(own))[0])
            new.setdefault(f"{name}_sum", []).append(x.sum(0).reshape(len(own), width))
        new[name] = np.concatenate(diagonal)
        new[f"{name}_sum"] = np.concatenate(new[f"{name}_sum"])
    return moments._replace(across={own: Across(**found) for own, found in across.items()}, **new)


def _configured(cls: type[Part], wanted: dict[str, Any]) -> Part:
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in wanted.items() if name in names})


def full_configuration(cls: type[Part], capacity: int = CAPACITY) -> Part:
    """Full rank, full budget, no quantisation; short exact ends, so that most tokens are really coded."""
    names = {field.name for field in dataclasses.fields(cls)}
    wanted = dict.fromkeys(("rank_k", "rank_v", "energy", "smaller", "budget_bytes", "keep", "bits"))
    wanted |= {"rank": 1.0, "sinks": 4, "recent": 8, "chunk_length": 32}
    wanted |= {"budget": capacity} if "budget" in names else {"keep": 1.0}
    return _configured(cls, wanted)


def small_configuration(cls: type[Part]) -> Part:
    """The default compression, shrunken to prompts of a hundred tokens."""
    return _configured(cls, {"budget": 24, "keep": None, "sinks": 4, "recent": 8, "chunk_length": 32, "dense_layers": 0,
                             "start": 0, "outliers": 1})


@functools.cache
def bases_for(method: Part, config: ModelConfig = PLAIN) -> Any:
    groups = machine_of(method).layer_groups(config.attention) if method.calibrated else ()
    return method.fit(config.attention, random_moments(config, group=max(map(len, groups), default=1)))


def run(
    method: Part,
    config: ModelConfig,
    tokens: jax.Array,
    prompt: int,
    *,
    lengths: jax.Array | None = None,
    capacity: int = CAPACITY,
    block: int = BLOCK,
    width: int = 1,
    dtype=jnp.float32,
) -> tuple[Any, np.ndarray]:
    """Prefill `tokens[:, :prompt]` and append the rest `width` tokens at a time, refreshing after each block.

    Returns the cache, and logits `[B, 1 + steps, V]` of the prompt's and of each piece's last token.
    """
    params, bases = model(config).params, bases_for(method, config)
    cache, logits = prefill(
        method,
        config,
        params,
        tokens[:, :prompt],
        lengths,
        bases=bases,
        capacity=capacity,
        block=block,
        dtype=dtype,
    )
    out = [logits]
    for i, begin in enumerate(range(prompt, tokens.shape[1], width)):
        if i and i % (block // width) == 0:
            cache = refresh(method, cache, bases=bases)
        cache, logits = extend(method, config, params, cache, tokens[:, begin : begin + width], bases=bases)
        out.append(logits)
    return cache, np.stack([np.asarray(x) for x in out], axis=1)


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
