"""Tokens in more bits than the others: which they are, and that attention reads both kinds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, random_moments, softmax_attention
from transform_oracle import LAYOUT, SIZE, SPEC, oracle, tokens_like

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.codecs.transform_bases import TransformBases
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import Place
from lowrank_kv_jax.method.accounting import full_cache_bytes
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.water_filled import bytes_of, components_of

SPECS = ("bits=2,fine=0.1,means=calibrated", "bits=2,fine=0.25,heads=per_head,rope=post,means=calibrated",
         "bits=1.5,fine=0.1,group=3,means=calibrated,metric=plain")
COUNTS = (SIZE, 17)
FIRST = 4  # position of the first token of `tokens_like`


def held(spec: str):
    method = parse_method(f"transform:{spec}")
    moments = random_moments(PLAIN, means=True, group=method.group)
    bases = method.fit(SPEC, moments)[0]
    q, tokens = zip(*(tokens_like(moments, layer, layer) for layer in range(bases.layers)), strict=True)
    counts = jnp.asarray(COUNTS)
    where = Runs(jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 2), jnp.int32))
    store = method.empty(LAYOUT, bases, SIZE)
    return method, bases, q, tokens, method.take_in(LAYOUT, bases, store, tokens, counts, counts, where)


def read(method, bases, tokens, classes):
    """Keys before RoPE (or after it) and values of every layer, in the widths of one class: `[L][B, T, K, D]`."""
    keys = [x.k_pre if method.rope == "pre" else x.k for x in tokens]
    return oracle(bases, "k", keys, classes[0]), oracle(bases, "v", [x.v for x in tokens], classes[1])


def leftovers(method, bases, tokens, found):
    """Weighted squared errors `[B, T]` of what was read, float64."""
    total = 0.0
    keys = [x.k_pre if method.rope == "pre" else x.k for x in tokens]
    for side, true, got in (("k", keys, found[0]), ("v", [x.v for x in tokens], found[1])):
        weight = getattr(bases, f"{side}_weight")
        square = sum(
            np.square((np.asarray(x, np.float64) - y) * (1.0 if weight is None else np.asarray(weight[i], np.float64)))
            .sum((2, 3)) for i, (x, y) in enumerate(zip(true, got, strict=True)))
        total = total + square / (np.sum(np.asarray(getattr(bases, f"{side}_scale"), np.float64) ** 2) if weight is None else 1)
    return total


@pytest.mark.parametrize("spec", SPECS)
def test_the_tokens_that_common_widths_err_most_on_are_fine(spec):
    method, bases, _, tokens, store = held(spec)
    error = leftovers(method, bases, tokens, read(method, bases, tokens, store.profile))
    for row, count in enumerate(COUNTS):
        some = count // method.every
        worst = np.sort(np.argsort(-error[row, :count], kind="stable")[:some])
        assert (int(store.fine.length[row]), int(store.tokens.length[row])) == (some, count - some)
        np.testing.assert_array_equal(store.fine.positions.position[row, 0, :some] - FIRST, worst)
        rest = np.setdiff1d(np.arange(count), worst)
        np.testing.assert_array_equal(store.tokens.positions.position[row, 0, : count - some] - FIRST, rest)
    assert all(sum(map(bytes_of, (store.fine_profile[i],))) > bytes_of(store.profile[i]) for i in (0, 1))


@pytest.mark.parametrize("spec", SPECS)
def test_attention_reads_both_classes(spec):
    method, bases, q, tokens, store = held(spec)
    last = bases.layers - 1
    part = method.attend(LAYOUT, bases, store, q[last], jnp.full((2, 3), 90), Place(index=last))
    (k, v), (fine_k, fine_v) = (read(method, bases, tokens, own) for own in (store.profile, store.fine_profile))
    fine = np.zeros((2, SIZE, 1, 1), bool)
    for row in range(2):
        fine[row, np.asarray(store.fine.positions.position[row, 0, : int(store.fine.length[row])]) - FIRST] = True
    k, v = np.where(fine, fine_k[last], k[last]), np.where(fine, fine_v[last], v[last])
    if method.rope == "pre":
        angles = rope_angles(SPEC.rope, jnp.broadcast_to(FIRST + jnp.arange(SIZE), (2, SIZE)))
        k = np.asarray(rotate(jnp.asarray(k, jnp.float32), *(x[:, :, None] for x in angles)))
    seen = np.broadcast_to(np.arange(SIZE) < np.asarray(COUNTS)[:, None, None], (2, 3, SIZE))
    out, lse = softmax_attention(q[last], k, v, seen, SPEC.scale)
    np.testing.assert_allclose(part.lse, lse, atol=2e-4)
    np.testing.assert_allclose(part.out, out, atol=2e-3)


def test_later_tokens_are_shared_out_alike():
    """Whatever leaves the exact ends at a time: one of so many is fine, and every token is held once."""
    method, bases, _, tokens, _ = held("bits=2,fine=0.25,heads=per_head,rope=post")
    store = method.empty(LAYOUT, bases, SIZE)
    take = jax.jit(lambda store, tokens, counts: method.take_in(LAYOUT, bases, store, tokens, counts, counts))
    at, rng = np.zeros(2, int), np.random.default_rng(3)
    (one,) = tokens
    while (at < SIZE - 8).all():
        counts = rng.integers(0, 9, 2)
        take_at = jnp.asarray(np.minimum(at[:, None] + np.arange(8), SIZE - 1))
        piece = one._replace(**{name: jnp.take_along_axis(x, take_at.reshape(2, 8, *(1,) * (x.ndim - 2)), 1)
                                for name, x in one._asdict().items()})
        store = take(store, (piece,), jnp.asarray(counts))
        at += counts
        np.testing.assert_array_equal(store.fine.length, at // 4)
        np.testing.assert_array_equal(store.tokens.length, at - at // 4)
    for row in range(2):
        both = [x.positions.position[row, 0, : int(x.length[row])] for x in (store.tokens, store.fine)]
        np.testing.assert_array_equal(np.sort(np.concatenate(both)), FIRST + np.arange(at[row]))


def test_widths_of_fine_tokens_are_saved_and_checked():
    method, bases, *_ = held(SPECS[0])
    back = TransformBases.restored({name: np.asarray(x) for name, x in bases.saved().items()})
    assert back.widths == bases.widths and back.widths.fine is not None
    assert bases.k.shape[-1] >= components_of(bases.widths.fine.rungs[0][0])
    plain = dataclasses.replace(method, fine=0.0)
    with pytest.raises(ValueError, match="with widths of fine tokens: transform has fine=0.0"):
        plain.check_bases(SPEC, bases)
    with pytest.raises(ValueError, match="without widths of fine tokens"):
        method.check_bases(SPEC, plain.fit(SPEC, random_moments(PLAIN, means=True))[0])
    with pytest.raises(ValueError, match=r"fine=0.6: must lie in 0..0.5"):
        parse_method("transform:fine=0.6")


def test_beside_a_selection_all_tokens_have_the_common_widths():
    assert parse_method("transform:bits=2,fine=0.1+kvzip:keep=0.5").codec == parse_method("transform:bits=2")


@pytest.mark.parametrize("spec", ["smaller=4,fine=0.05,group=3", "smaller=3,fine=0.1,steps=prompt"])
def test_all_bytes_count(spec):
    """A cache with fine tokens is as small as it was asked to be, and not much smaller."""
    method = parse_method(f"transform:{spec}")
    bases = method.fit(SPEC, random_moments(PLAIN, means=True, group=method.group))
    layout = make_layout(PLAIN, 2, 400, 480, dtype=jnp.bfloat16)
    groups, machine = method.layer_groups(SPEC), machine_of(method)
    states = [machine.init(layout.of_layer(group[0]), own) for group, own in zip(groups, bases, strict=True)]
    assert all(state.store.fine is not None for state in states)
    total = sum(x.nbytes for x in jax.tree.leaves(states))
    assert 1.0 <= full_cache_bytes(SPEC, 2 * 480) / total / method.smaller < 1.12
