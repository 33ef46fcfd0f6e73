"""Which tokens a cache says that it holds."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, PLAIN, PROMPT, bases_for, methods, model, prompts, run, small_configuration

import lowrank_kv_jax as lkv
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.method.accounting import nbytes
from lowrank_kv_jax.method.held import Held, held_tokens, layer_bytes
from lowrank_kv_jax.methods import REGISTRY, machine_of
from lowrank_kv_jax.storage.state import walk

LENGTHS = (PROMPT, 61)


def prompt_of(method):
    return prefill(
        method, PLAIN, model().params, prompts(), np.array(LENGTHS), bases=bases_for(method), block=BLOCK, dtype=jnp.float32
    )[0]


@pytest.mark.parametrize("name", list(methods()))
def test_every_method_says_what_it_holds_of_a_prompt(name):
    """Of two rows: everything without a selection; with one its exact ends and, between them, what it stores."""
    cache = prompt_of(small_configuration(REGISTRY[name]))
    machine = machine_of(cache.method)
    ends = machine.ends_of(cache.layout, machine.group_bases(PLAIN.attention, bases_for(cache.method))[0])
    for row, length in enumerate(LENGTHS):
        held = held_tokens(cache, row)
        assert held.shape == (PLAIN.num_layers, PLAIN.kv_heads, length)
        if machine.selection is None:
            assert (held > Held.GONE).all()
            continue
        assert (held[..., : ends.sinks] == Held.EXACT).all() and (held[..., length - ends.recent :] == Held.EXACT).all()
        middle = (held[..., ends.sinks : length - ends.recent] > Held.GONE).sum((1, 2))
        stored = [0 if group.store is None else group.store.tokens for group in cache.groups]
        counts = [x and int(x.length[row]) * (1 if x.positions.owner is not None else PLAIN.kv_heads) for x in stored]
        assert middle.tolist() == counts
        assert (held == Held.GONE).any() or row == 1
    assert sum(layer_bytes(cache)) == sum(nbytes(x) for _, x, _ in walk(cache.groups))


def test_positions_are_those_of_the_text():
    held = held_tokens(prompt_of(lkv.parse_method("streamingllm:budget=24,sinks=4")))
    assert [np.flatnonzero(one).tolist() for one in held[:, 0]] == [[*range(4), *range(76, 96)]] * 3
    coded = held_tokens(prompt_of(lkv.parse_method("static-pca:rank=0.5,sinks=3,recent=5")))
    assert (coded[..., 3:91] == Held.CODED).all() and (coded[..., :3] == Held.EXACT).all() and (coded[..., 91:] == Held.EXACT).all()


def test_heads_have_tokens_of_their_own():
    """Packed heads of unequal budgets, stored in few bits."""
    held = held_tokens(prompt_of(lkv.parse_method("kivi:bits=4,group=8+adakv:budget=32,recent=8")))
    counts = (held == Held.CODED).sum(-1)
    assert len(set(counts.ravel().tolist())) > 1 and (counts.sum(1) <= 4 * 24 + 2).all()


def test_merged_layers_hold_some_tokens_exactly():
    held = held_tokens(prompt_of(lkv.parse_method("minicache:start=1,budget=9")))
    assert (held[0] == Held.EXACT).all()
    for layer in (1, 2):
        assert ((held[layer] == Held.EXACT).sum(-1) == 9).all() and ((held[layer] == Held.CODED).sum(-1) == PROMPT - 9).all()


def test_decoded_tokens_count():
    cache, _ = run(lkv.parse_method("h2o:budget=24,recent=8"), PLAIN, prompts(length=PROMPT + 20), PROMPT)
    held = held_tokens(cache)
    assert held.shape[-1] == PROMPT + 20 and (held[..., -8:] == Held.EXACT).all()
    assert ((held > Held.GONE).sum(-1) == 24 + int(cache.pending)).all()


def test_a_row_that_is_not_there():
    with pytest.raises(ValueError, match=r"row=2: must lie in 0\.\.1"):
        held_tokens(prompt_of(lkv.parse_method("full")), 2)
