"""What every registered method promises of one group of layers, on arrays: no model, and one program for all promises.

`test_contract` asks the same of whole models, of a few representatives here and of every method under `-m slow`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, exact_configuration, small_configuration, softmax_attention

from lowrank_kv_jax.attention.rope import rope_angles, rotate
from lowrank_kv_jax.attention.spec import Taps
from lowrank_kv_jax.generation.forward import make_layout
from lowrank_kv_jax.method import REGISTRY, Place
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.storage.state import map_leaves, walk

SPEC, BLOCKS, ROWS = PLAIN.attention, 3, 2
TOKENS = BLOCKS * BLOCK
TOLERANCE = 2e-5  # of outputs of order 1, at full rank and budget, in float32

# run by hand: the same parts as another method's, with other defaults
ALIKE = {
    "adakv", "eigen-n", "eigenattention", "h2o", "osp-static", "pyramidkv", "scissorhands", "sliding-window", "snapkv", "static-pca",
    "static-pca-h",
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.xdist_group(f"arrays-{name}"), *([pytest.mark.slow] if name in ALIKE else [])])
    for name in sorted(REGISTRY)
]
BY_COMPONENT = [  # coefficients whose components have bits of their own
    pytest.param(f"{spec},sinks=4,recent=8", marks=[pytest.mark.xdist_group(f"arrays-{spec}"), pytest.mark.slow][: 1 + slow])
    for spec, slow in (
        ("ojakv:bits=2.5", True), ("ojakv:bits=2.5,estimator=covariance", True), ("static-pca:bits=2.5", True),
        ("palu:bits=2.5", True), ("streamingkv:bits=2.5", True), ("single-svd:bits=2.5", True), ("xkv:bits=2.5,group=2", True),
        ("xkv:bits=2.5,recompress=8", True), ("xkv:bits=2.5,rebuild=24,rebuild_block=8", True),
    )
]
every_method = pytest.mark.parametrize("name", NAMES)
every_method_and_bits = pytest.mark.parametrize("name", [*NAMES, *BY_COMPONENT])


def activations(seed: int, tokens: int, layers: int, starts=(0, 0), rereads: bool = False) -> tuple[Taps, ...]:
    """Taps of `tokens` tokens, each row from its position of `starts` on, of anisotropic random activations."""
    rng, scale = np.random.default_rng(seed), np.linspace(1.6, 0.3, SPEC.head_dim)
    cos, sin = rope_angles(SPEC.rope, (jnp.asarray(starts, jnp.int32)[:, None] + jnp.arange(tokens))[:, :, None])
    taps = []
    for _ in range(layers):
        heads = SPEC.q_heads, SPEC.kv_heads, SPEC.kv_heads
        q, k, v = (jnp.asarray(rng.normal(size=(ROWS, tokens, n, SPEC.head_dim)) * scale, jnp.float32) for n in heads)
        again = jnp.asarray(rng.random((ROWS, SPEC.kv_heads, tokens)), jnp.float32) if rereads else None
        taps.append(Taps(rotate(q, cos, sin), rotate(k, cos, sin), k, v, jnp.zeros((ROWS, tokens, 1)), again))
    return tuple(taps)


class Case(NamedTuple):
    """A method with one of its groups, and its compiled program: a prompt, then tokens block by block."""

    machine: Any
    layout: Any
    bases: Any
    layers: int
    program: Any

    def run(self, seed=0, lengths=(PROMPT, 61), counts=None):
        """Compress a prompt and append `TOKENS` tokens in `BLOCKS` blocks, each with a refresh behind it.

        Args:
            counts: int `[BLOCKS, BLOCK, B]`, 1 where a row takes the token.

        Returns:
            The prompt's taps and those of the tokens; the state after compression, those after each block, stacked, and
            the outputs `[layers, B, TOKENS, N, D]`.
        """
        lengths = jnp.asarray(lengths, jnp.int32)
        counts = jnp.ones((BLOCKS, BLOCK, ROWS), jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
        prompt = activations(seed, PROMPT, self.layers, rereads=self.machine.rereads)
        taps = activations(seed + 100, TOKENS, self.layers, lengths)
        return prompt, taps, *self.program(self.bases, prompt, lengths, taps, counts)


@functools.cache
def case(name: str, full: bool) -> Case:
    """The method at full rank and budget, or compressing; or what a spec says."""
    part = parse_method(name) if ":" in name else (exact_configuration if full else small_configuration)(REGISTRY[name])
    machine, layout = machine_of(part), make_layout(PLAIN, ROWS, PROMPT, CAPACITY, BLOCK, jnp.float32)
    groups = machine.layer_groups(SPEC)
    which = max(range(len(groups)), key=lambda i: (len(groups[i]), i))
    bases = machine.group_bases(SPEC, bases_for(part) if part.calibrated else None)[which]
    layers = len(groups[which])

    @jax.jit
    def program(bases, prompt, lengths, taps, counts):
        start = machine.compress(layout, bases, machine.init(layout, bases), prompt, lengths)

        def step(carry, new):
            (state, length), (taps, counts), out = carry, new, []
            for index, tap in enumerate(taps):
                tap, place = Taps(*(x[:, None] for x in tap[:5])), Place(index, None)
                state = machine.append(layout, bases, state, tap, counts, length[:, None], place)
                part = machine.attend(layout, bases, state, tap.q, length[:, None], place)
                state = machine.observe(layout, bases, state, tap.q, part.lse, length[:, None], place)
                out.append(part.out[:, 0])
            return (state, length + counts), jnp.stack(out)

        def block(carry, new):
            (state, length), out = jax.lax.scan(step, carry, new)
            state = machine.refresh(layout, bases, state)
            return (state, length), (state, out)

        pieces = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0).reshape(BLOCKS, BLOCK, ROWS, *x.shape[2:]), taps)
        _, (states, out) = jax.lax.scan(block, (start, lengths), (pieces, counts))
        return start, states, jnp.moveaxis(out.reshape(TOKENS, *out.shape[2:]), 0, 2)

    return Case(machine, layout, bases, layers, program)


def exact_outputs(prompt, taps, lengths):
    """Attention of every new token over the prompt and all before it, float64 `[layers, B, TOKENS, N, D]`."""
    slots = np.arange(PROMPT + TOKENS)
    of_prompt = slots[None] < np.minimum(np.asarray(lengths)[:, None], PROMPT)
    behind = (slots >= PROMPT) & (slots[None] <= PROMPT + np.arange(TOKENS)[:, None])
    mask = of_prompt[:, None] | behind[None]
    return np.stack([
        softmax_attention(new.q, *(np.concatenate(pair, 1) for pair in ((old.k, new.k), (old.v, new.v))), mask, SPEC.scale)[0]
        for old, new in zip(prompt, taps, strict=True)
    ])


def leaves_of_row(state, row):
    return [np.take(np.asarray(x), row, info.axes.index("batch")) for _, x, info in walk(state) if "batch" in info.axes]


@every_method
@pytest.mark.parametrize("lengths", [(PROMPT, 61), (1, 6)], ids=["long", "short"])
def test_full_rank_and_budget_are_exact_attention(name, lengths):
    """Over three refreshes; of prompts shorter than the exact ends too, where parts stay empty for a while."""
    prompt, taps, _, _, out = case(name, True).run(lengths=lengths)
    np.testing.assert_allclose(out, exact_outputs(prompt, taps, lengths), atol=TOLERANCE, rtol=0)


@every_method_and_bits
def test_compression_is_finite_and_shows(name):
    prompt, taps, _, _, out = case(name, False).run()
    assert np.isfinite(out).all() and np.isfinite(case(name, False).run(lengths=(1, 6))[-1]).all()
    if ":" in name or case(name, False).machine != case(name, True).machine:
        assert np.abs(out - exact_outputs(prompt, taps, (PROMPT, 61))).max() > 100 * TOLERANCE  # the test above can fail


@every_method_and_bits
def test_nothing_passes_from_prompt_to_prompt_or_from_row_to_row(name):
    """Nor from the padding: the second row's is other numbers in the second run."""
    small = case(name, False)
    first, again, other = small.run()[-1], small.run()[-1], small.run(seed=1)[-1]
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01
    prompt, taps, *_ = small.run()
    noise = activations(2, PROMPT, small.layers, rereads=small.machine.rereads)
    padding = np.arange(PROMPT) >= 61

    def changed(ours, theirs, where):
        return jnp.where(where, theirs, ours)

    mixed = []
    for ours, theirs in zip(prompt, noise, strict=True):
        parts = [changed(a, b, padding[:, None, None]) for a, b in zip(ours[:4], theirs[:4], strict=True)]
        parts = [part.at[0].set(noise_part[0]) for part, noise_part in zip(parts, theirs[:4], strict=True)]
        mixed.append(Taps(*parts, ours.x, None if ours.reread is None else ours.reread.at[0].set(theirs.reread[0])))
    lengths, ones = jnp.array([PROMPT, 61], jnp.int32), jnp.ones((BLOCKS, BLOCK, ROWS), jnp.int32)
    *_, out = small.program(small.bases, tuple(mixed), lengths, taps, ones)
    np.testing.assert_allclose(np.asarray(out)[:, 1], first[:, 1], atol=TOLERANCE)


@every_method_and_bits
def test_rows_that_wait_stay_as_they_are(name):
    counts = np.ones((BLOCKS, BLOCK, ROWS), np.int32)
    counts[1:, :, 1] = 0
    _, _, _, states, _ = case(name, False).run(counts=counts)
    blocks = [leaves_of_row(jax.tree.map(lambda x, i=i: np.asarray(x)[i], states), 1) for i in range(BLOCKS)]
    for one, two, three in zip(*blocks, strict=True):
        np.testing.assert_array_equal(two, one)
        np.testing.assert_array_equal(three, one)


@every_method_and_bits
def test_leaves_are_declared_and_keep_the_shapes_of_init(name):
    small = case(name, False)
    empty = jax.eval_shape(functools.partial(small.machine.init, small.layout), small.bases)
    state = small.run()[2]
    chex.assert_trees_all_equal_structs(empty, state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(empty)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert len(list(walk(state))) == len(jax.tree.leaves(state))
    for path, array, info in walk(state):
        assert len(info.axes) == array.ndim and array.shape[info.axes.index("batch")] == ROWS, path
    assert map_leaves(lambda info, x: x.nbytes, state) is not None


@every_method_and_bits
def test_a_step_works_in_place(name):
    """The state is donated, and no leaf of it is copied, be the capacity a hundred times the prompt."""
    small = case(name, False)
    machine, layout = small.machine, dataclasses.replace(small.layout, capacity=1 << 14)

    def step(bases, state, tap, counts, positions):
        place = Place(small.layers - 1, None)
        state = machine.append(layout, bases, state, tap, counts, positions, place)
        part = machine.attend(layout, bases, state, tap.q, positions, place)
        return machine.observe(layout, bases, state, tap.q, part.lse, positions, place), part.out

    def of(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    tap = Taps(*(of(ROWS, 1, n, SPEC.head_dim) for n in (SPEC.q_heads, *[SPEC.kv_heads] * 3)), of(ROWS, 1, 1))
    state = jax.eval_shape(functools.partial(machine.init, layout), small.bases)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    lowered = jax.jit(step, donate_argnums=1).lower(small.bases, state, tap, of(ROWS, dtype=jnp.int32), of(ROWS, 1, dtype=jnp.int32))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= held
    # attention reads, and rebuilds, blocks of up to 2048 of the 16384 tokens; keys or values copied would be a half. A cache
    # of a few bits is smaller than what is rebuilt of a block: three blocks of floats, be the capacity what it will.
    blocks = 3 * ROWS * 2048 * SPEC.kv_heads * SPEC.head_dim * 4 + (1 << 16)  # and a step's own
    allowed = max(0.32 * held / small.layers + (1 << 19), blocks)
    assert memory.temp_size_in_bytes <= allowed, f"{memory.temp_size_in_bytes} of {held}"
