"""Bases of transform coding refined by gradient, on what their codes do to the outputs of attention.

Principal directions and the steps of a Gaussian quantiser err least in keys and values; what counts is what attention
makes of them. Adam moves directions, means and steps, and directions are orthonormal again after each update.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lowrank_kv_jax.calibration.coded_attention import Group, Seen, groups_of, output_error
from lowrank_kv_jax.calibration.taps import checked_windows, spread
from lowrank_kv_jax.checks.bounds import check_int
from lowrank_kv_jax.codecs.transform_bases import SIDES, TransformBases, directions_of, stored
from lowrank_kv_jax.method import REGISTRY, Part
from lowrank_kv_jax.method.group import GroupBases
from lowrank_kv_jax.methods.compose import machine_of
from lowrank_kv_jax.methods.group_bases import bases_of_group
from lowrank_kv_jax.progress import ProgressBar

LENGTH, TEXTS = 1024, 8
"""Tokens of a text, and most texts; they are taken evenly from the calibration's."""
PARTS = {"steps": ("k_scale", "v_scale"), "bases": ("k", "v", "k_mean", "v_mean")}
"""What is learnt, as fields of the bases; steps by their logarithms."""
RATES = {"steps": 1e-2, "bases": 1e-3}
"""Of Adam, falling to 0 as half a cosine; those of means in deviations of their channels."""
MOST_STEPS = 10**6

Learnt = dict[str, jax.Array]
"""By field of the bases: directions and means as float32, logarithms of deviations."""


def check_refinable(method: Part) -> None:
    """Raise ValueError where a method has no bases that can be refined."""
    codec: Any = machine_of(method).codec
    if codec.bases_type is not TransformBases:
        able = ", ".join(sorted(name for name, cls in REGISTRY.items() if cls.bases_type is TransformBases))
        raise ValueError(f"refine: method {method.name!r} has no bases that can be refined; methods that have: {able}")
    if codec.smaller is not None:
        raise ValueError(f"refine: smaller={codec.smaller} leaves the widths to each prompt's length; give bits= instead")
    if codec.mean_bits is None:
        raise ValueError("refine: bits=None rounds nothing; give bits=")


def refine(
    model: Any, method: Part, bases: tuple[Any, ...], tokens: np.ndarray, steps: int,
    learn: Collection[str] = tuple(PARTS), seed: int = 0, progress: bool = False,
) -> tuple[Any, ...]:
    """Bases whose codes err less in the outputs of attention (see `output_error`), group by group of layers.

    Args:
        model: a `LoadedModel`.
        bases: of `calibrate`.
        tokens: int32 `[n, S]`, windows of a corpus.
        steps: of Adam for each group, of a text each.
        learn: "steps", those of the quantiser; "bases", directions and means; or both.
        seed: of the queries, and of the order of texts.
        progress: show a progress bar.

    Returns:
        Bases of the same shapes and dtypes: directions are in 8 bits again.

    Raises:
        ValueError: a method without such bases, bases of another one, windows of exact tokens alone, or what is learnt is
            not finite (layers are named).
    """
    check_int("steps", steps, most=MOST_STEPS)
    check_refinable(method)
    if not learn or not set(learn) <= set(PARTS):
        raise ValueError(f"learn={tuple(learn)!r}: must name some of {', '.join(PARTS)}")
    of_groups = bases_of_group(method, model.config.attention, bases)
    tokens = checked_windows(model.config, tokens)
    if not steps:
        return bases
    texts = spread(tokens, min(LENGTH, tokens.shape[1]), TEXTS)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(texts)) for _ in range(-(-steps // len(texts)))])[:steps].tolist()
    found = []
    with ProgressBar("refining", steps * len(of_groups), progress) as bar:
        for (group, seen), own, old in zip(groups_of(model, method, texts, seed), of_groups, bases, strict=True):
            new = _refined(group, own.codec, seen, learn, order, bar)
            found.append(dataclasses.replace(old, codec=new) if isinstance(old, GroupBases) else new)
    return tuple(found)


def _refined(
    group: Group, bases: TransformBases, seen: Seen, learn: Collection[str], order: list[int], bar: ProgressBar
) -> TransformBases:
    learnt = _begun(bases, learn)
    rates, state = _rates(group, learnt, seen), _adam(len(order)).init(learnt)
    for text in order:
        learnt, state = _update(group.kind, len(order), bases, seen.of_text(text), rates, learnt, state)
        bar.advance()
    if not all(np.isfinite(x).all() for x in learnt.values()):
        raise ValueError(f"refine: what layers {group.layers[0]} to {group.layers[-1]} learnt is not finite")
    return _stored(bases, learnt)


def _adam(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(1.0, steps))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(group: Group, steps: int, bases: TransformBases, seen: Seen, rates: Learnt, learnt: Learnt, state: Any):
    """One of `steps` updates, from one text."""
    gradient = jax.grad(lambda learnt: output_error(group, _with(bases, learnt), seen))(learnt)
    moves, state = _adam(steps).update(gradient, state)
    moved: Any = optax.apply_updates(learnt, jax.tree.map(jnp.multiply, moves, rates))
    return moved | _retracted(bases.coded, moved), state


def _retracted(coded: tuple[tuple[str, ...], ...], learnt: Learnt) -> Learnt:
    """The directions of each code, orthonormal again: of keys, of values, or of both as one basis."""
    found: Learnt = {}
    for sides in (sides for sides in coded if sides[0] in learnt):
        whole = retracted(jnp.concatenate([learnt[side] for side in sides], axis=1))
        found |= dict(zip(sides, jnp.split(whole, len(sides), axis=1), strict=True))
    return found


def retracted(basis: jax.Array) -> jax.Array:
    """Orthonormal `[J, W, R]`, R <= W, near a basis that was: Q of its QR decomposition, no column turned round."""
    q, r = jnp.linalg.qr(basis)
    return q * jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[:, None]


def _begun(bases: TransformBases, learn: Collection[str]) -> Learnt:
    """What is learnt, as it begins."""
    found = {}
    for name in (name for part in learn for name in PARTS[part] if getattr(bases, name) is not None):
        x = getattr(bases, name).astype(jnp.float32)
        if name in SIDES:  # a smaller last group may have columns of zeros behind its own
            most = len(SIDES) // len(bases.coded) * x.shape[1]
            x = directions_of(bases, name)[..., :most]
        found[name] = jnp.log(x) if name.endswith("_scale") else x
    return found


def _rates(group: Group, learnt: Learnt, seen: Seen) -> Learnt:
    """Rates of all that is learnt."""
    rates = {name: jnp.full((), RATES[part]) for part, names in PARTS.items() for name in names if name in learnt}
    for side, tap in zip(SIDES, (group.codec.keys, "v"), strict=True):
        if f"{side}_mean" in rates:
            rates[f"{side}_mean"] *= jnp.stack([getattr(own, tap).std((0, 1)) for own in seen.taps])
    return rates


def _with(bases: TransformBases, learnt: Learnt) -> TransformBases:
    """The bases with what was learnt in its place, directions as floats."""
    new: dict[str, Any] = {}
    for name, x in learnt.items():
        if name in SIDES:
            zeros = bases.rank(name) - x.shape[-1]
            new |= {name: jnp.pad(x, ((0, 0), (0, 0), (0, zeros))), f"{name}_coarse": None, f"{name}_unit": None}
        else:
            new[name] = jnp.exp(x) if name.endswith("_scale") else x
    return bases._replace(**new)


def _stored(bases: TransformBases, learnt: Learnt) -> TransformBases:
    """The same in the dtypes that `bases` have."""
    new = _with(bases, learnt)
    for side in (side for side in SIDES if side in learnt):
        basis = np.asarray(getattr(new, side), np.float64)
        new = new._replace(**stored(side, basis, bases.layers, getattr(bases, side).shape[-1]))
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), new, bases)
