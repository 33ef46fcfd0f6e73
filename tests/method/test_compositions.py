"""Every codec with every selection, with and without a summary: what compositions promise to those who generate.

Few heads with short exact ends, so that most tokens are coded; and eight kv heads, where some methods group heads, with
the settings that methods come with.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN, bases_for, model, prompts, small_configuration

import lowrank_kv_jax as lkv
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.generation.generate import Progress
from lowrank_kv_jax.methods import REGISTRY, compose
from lowrank_kv_jax.methods.parse import spell_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.state import walk
from lowrank_kv_jax.summaries.component import Summary

FEW = dataclasses.replace(PLAIN, num_layers=2, windows=(None, None))
EIGHT = dataclasses.replace(
    PLAIN, num_layers=1, windows=(None,), q_heads=16, kv_heads=8, head_dim=4, rope=RopeSpec(10000.0, 4)
)
LENGTHS = {FEW: (96, 70), EIGHT: (256, 230)}  # in the first, half of a prompt's tokens go; in the second, three quarters
BLOCK = 8

CODECS = [None, *sorted(name for name, cls in REGISTRY.items() if cls.stage == "codec")]
SELECTIONS = sorted(name for name, cls in REGISTRY.items() if cls.stage == "selection")


def composed(config, codec, selection, summary):
    """The composition, of selections that decode as they do by default, or else that keep what is decoded.

    Raises:
        ValueError: the parts do not go together.
    """
    small = small_configuration if config is FEW else lambda cls: cls()
    # kivi has no ends of its own behind a selection
    parts = (
        None if codec is None else REGISTRY[codec]() if codec == "kivi" else small(REGISTRY[codec]),
        small(REGISTRY[selection]), Summary() if summary else None,
    )
    try:
        return compose(*parts)
    except ValueError:
        if "decoding" not in {field.name for field in dataclasses.fields(parts[1])} or parts[1].decoding == "keep":
            raise
        return compose(parts[0], dataclasses.replace(parts[1], decoding="keep"), parts[2])


def refusal(config, *names):
    """Why the parts do not go together, or None."""
    try:
        composed(config, *names)
    except ValueError as error:
        return str(error)


PARTS = [(codec, rule, summary) for codec in CODECS for rule in SELECTIONS for summary in (False, True)]
QUICK = {  # of each shape of state one: the whole product is slow
    (FEW, "xkv", "snapkv", True), (EIGHT, "palu", "h2o", False),
    (FEW, "transform", "kvzip", True), (FEW, "static-pca", "adakv", False),
}


def cases():
    for config, heads in ((FEW, "few"), (EIGHT, "eight")):
        for names in PARTS:
            if refusal(config, *names) is None:
                case = (config, *names)
                label = "+".join(filter(None, (*names[:2], "moments" if names[2] else None)))
                yield pytest.param(*case, id=f"{heads}-{label}", marks=() if case in QUICK else pytest.mark.slow)


def rows_of(cache):
    """Leaves of each row, on the host; of a store the slots that hold a token."""
    leaves = {name: (np.asarray(x), info.axes) for name, x, info in walk(cache) if "batch" in info.axes}

    def of_row(name, x, axes, row):
        held = leaves.get(".".join(name.split(".")[:2]) + ".store.tokens.length")
        if held is not None and "tokens" in axes and (".store." in name or ".far_votes" in name):
            x = np.take(x, np.arange(held[0][row]), axis=axes.index("tokens"))
        return np.take(x, row, axis=axes.index("batch"))

    return [
        {name: of_row(name, x, axes, row) for name, (x, axes) in leaves.items()} for row in range(cache.layout.batch)
    ]


def shapes_of(cache):
    return [(name, x.shape, x.dtype) for name, x, _ in walk(cache)]


def assert_row_untouched(before, after):
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)


def keeps_its_promises(method, config, tmp_path):
    """Two refreshes, a second turn, forks, disk, rows that wait, and bytes."""
    bases, weights = bases_for(method, config), model(config)
    named = types.SimpleNamespace(name="tiny", fingerprint="f" * 64, config=config, params=weights.params, tokenizer=None)
    texts = [row[:length].tolist() for row, length in zip(prompts(2, 256), LENGTHS[config], strict=True)]
    go_on = functools.partial(lkv.generate, named, method, bases=bases, stop_at_eos=False)
    first = go_on(texts, max_new_tokens=2 * BLOCK + 2, block=BLOCK, capacity=320, dtype=jnp.float32)
    assert all(len(row) == 2 * BLOCK + 2 for row in first.tokens)

    foretold = abstract_cache(method, first.cache.layout, bases)
    assert shapes_of(foretold) == shapes_of(first.cache)
    assert lkv.cache_bytes(foretold, bases) == lkv.cache_bytes(first.cache, bases)

    lkv.save_cache(tmp_path / "cache", first.cache, named, bases=bases)
    restored = lkv.load_cache(tmp_path / "cache", method, named, bases=bases)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(first.cache), strict=True):
        np.testing.assert_array_equal(one, other)

    turn = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7]]
    second = go_on(turn, cache=first, max_new_tokens=BLOCK + 1)
    assert all(len(row) == BLOCK + 1 for row in second.tokens)

    forked, mine = lkv.fork(first.cache, 2), rows_of(first.cache)
    assert shapes_of(forked) == shapes_of(abstract_cache(method, forked.layout, bases))
    for row, copy in enumerate(rows_of(forked)):
        assert_row_untouched(mine[row // 2], copy)

    before = rows_of(second.cache)
    cache, progress = second.cache, Progress(second.last, jnp.array([False, True]), jnp.zeros(2, bool))
    keys = jax.vmap(jax.random.key)(jnp.zeros(2, jnp.uint32))
    for _ in range(2):
        cache, progress, out = lkv.decode_block(
            method, config, weights.params, cache, progress, keys, jnp.int32(BLOCK), bases=bases, sampler=lkv.Sampler(), eos=()
        )
    assert (np.asarray(out)[0] >= 0).all() and (np.asarray(out)[1] < 0).all()
    assert_row_untouched(before[1], rows_of(cache)[1])


@pytest.mark.parametrize("config, codec, selection, summary", list(cases()))
def test_what_composes_keeps_its_promises(config, codec, selection, summary, tmp_path):
    keeps_its_promises(composed(config, codec, selection, summary), config, tmp_path)


@pytest.mark.parametrize("spec", [
    "transform:bits=2,group=2,sinks=2,recent=4+kvzip:keep=0.5,recent=8",
    pytest.param("transform:bits=3,group=2,heads=per_head,rope=post,sinks=2,recent=4+adakv:keep=0.5,recent=8+moments", marks=pytest.mark.slow),
    pytest.param("transform:smaller=2,group=2,sinks=2,recent=4", marks=pytest.mark.slow),
])
def test_layers_that_are_coded_together_keep_their_promises(spec, tmp_path):
    keeps_its_promises(lkv.parse_method(spec), FEW, tmp_path)


def test_what_does_not_compose_is_refused_in_a_line_that_names_both():
    for config in (FEW, EIGHT):
        reasons = {names: refusal(config, *names) for names in PARTS}
        for (codec, selection, summary), reason in reasons.items():
            if reason is not None:
                others = [name for name in (codec, summary and "moments") if name]
                assert "\n" not in reason and selection in reason and any(name in reason for name in others)
        there = {names[:2] for names, reason in reasons.items() if reason is None and names[0] is not None}
        assert len(there) == 93  # of 135; it may only grow


def test_compositions_are_spelled_as_they_are_read():
    for names in PARTS:
        if refusal(FEW, *names) is None:
            method = composed(FEW, *names)
            assert lkv.parse_method(spell_method(method)) == method
