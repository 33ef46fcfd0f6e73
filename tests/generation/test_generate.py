"""Prompts in, tokens out: against a loop that prefills everything anew for every token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN as THREE
from helpers import Model, bases_for, model, prompts, small_configuration

from lowrank_kv_jax.generation.forward import DEFAULT_BLOCK, decode_step, extend, prefill, refresh
from lowrank_kv_jax.generation.generate import NEXT_TURN, decode, decode_block, generate, ingest
from lowrank_kv_jax.generation.layers import layer_extend
from lowrank_kv_jax.method import Fault
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.method.cache import fork, take_rows
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases

FULL = REGISTRY["full"]()
PLAIN = dataclasses.replace(THREE, num_layers=1, windows=(None,))  # whole loops are compiled, layer after layer
ROWS = [prompts(1, n, seed=14 + i)[0].tolist() for i, n in enumerate((37, 5))]  # whose greedy text varies
NEW = 40
gen = functools.partial(generate, dtype=jnp.float32, block=8)


def with_eos(*eos):
    return Model(dataclasses.replace(PLAIN, eos_ids=eos), model(PLAIN).params)


@functools.cache
def greedy():
    """NEW tokens of each row from exact logits of the whole sequence so far."""
    rows = [list(row) for row in ROWS]
    for _ in range(NEW):
        padded = jnp.asarray([row + [0] * (96 - len(row)) for row in rows], jnp.int32)
        lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
        _, logits = prefill(FULL, PLAIN, model(PLAIN).params, padded, lengths, dtype=jnp.float32)
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, ROWS, strict=True)]


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 9)), NEW])
def test_greedy_is_the_argmax_loop(count):
    out = gen(model(PLAIN), FULL, ROWS, max_new_tokens=count, capacity=128)
    assert out.tokens == [row[:count] for row in greedy()]
    assert out.last.tolist() == [row[-1] for row in out.tokens] and out.texts is None
    assert out.cache.length.tolist() == [len(row) + count - 1 for row in ROWS]


def test_tokens_stream_in_blocks():
    pieces = []
    out = gen(model(PLAIN), FULL, ROWS, max_new_tokens=20, capacity=128, on_tokens=pieces.append)
    assert [piece.shape[1] for piece in pieces] == [1, 8, 8, 3]
    assert np.concatenate(pieces, axis=1).tolist() == out.tokens


def test_rows_end_at_eos_and_keep_their_cache():
    first, second = greedy()
    stop = next(t for i, t in enumerate(first) if i >= 3 and t not in first[:i] and t not in second)
    at, pieces = first.index(stop), []
    out = gen(with_eos(stop), FULL, ROWS, max_new_tokens=NEW, capacity=128, on_tokens=pieces.append)
    assert out.tokens == [first[:at], second]
    streamed = np.concatenate(pieces, axis=1)[0]
    assert streamed[: at + 1].tolist() == first[: at + 1] and (streamed[at + 1 :] == -1).all()
    assert out.cache.length.tolist() == [len(ROWS[0]) + at, len(ROWS[1]) + NEW - 1]
    assert out.last.tolist() == [stop, second[-1]]
    assert (
        gen(with_eos(stop), FULL, ROWS, max_new_tokens=NEW, capacity=128, stop_at_eos=False).tokens
        == greedy()
    )


def test_generation_ends_when_every_row_has():
    first = greedy()[0]
    pieces = []
    out = gen(with_eos(first[2]), FULL, ROWS[:1], max_new_tokens=NEW, capacity=128, on_tokens=pieces.append)
    assert out.tokens == [first[: first.index(first[2])]]
    assert sum(piece.shape[1] for piece in pieces) <= 9
    assert gen(with_eos(first[0]), FULL, ROWS[:1], max_new_tokens=NEW, capacity=128).tokens == [[]]


def test_another_turn_equals_a_fresh_prompt_of_everything():
    first = greedy()[0]
    stop = first[4]
    chat = with_eos(stop)
    before = gen(chat, FULL, ROWS, max_new_tokens=12, capacity=128)
    turns = [[1, 2, 3], list(range(20))]
    said = [[last, *turn] for last, turn in zip(before.last.tolist(), turns, strict=True)]
    after = gen(chat, FULL, said, max_new_tokens=10, cache=before.cache)
    whole = [
        [*prompt, *tokens, *([] if tokens and tokens[-1] == last else [last]), *turn]
        for prompt, tokens, last, turn in zip(ROWS, before.tokens, before.last.tolist(), turns, strict=True)
    ]
    assert after.tokens == gen(chat, FULL, whole, max_new_tokens=10, capacity=128).tokens
    # the conversation was kept, not consumed; given whole, it puts its last token in front by itself
    assert gen(chat, FULL, turns, max_new_tokens=10, cache=before).tokens == after.tokens
    with pytest.raises(ValueError, match="prompts has 1 rows: the conversation that they continue has 2"):
        gen(chat, FULL, turns[:1], max_new_tokens=10, cache=before)


def test_seeds_belong_to_rows_not_to_the_batch():
    sampled = functools.partial(
        gen, model(PLAIN), FULL, max_new_tokens=24, temperature=1.0, top_k=40, capacity=128
    )
    together = sampled(ROWS, seeds=[5, 6]).tokens
    assert sampled(ROWS[::-1], seeds=[6, 5]).tokens == together[::-1]
    assert sampled(ROWS[1:], seeds=6).tokens == together[1:]
    assert sampled(ROWS, seeds=[5, 7]).tokens[0] == together[0]
    assert sampled(ROWS, seeds=[5, 7]).tokens[1] != together[1]
    assert together != greedy()


def test_every_turn_draws_anew():
    chat = functools.partial(gen, model(PLAIN), FULL, max_new_tokens=8, temperature=1e6, capacity=128)
    first = chat([[1, 2, 3]])
    second = chat([[4, 5]], cache=first)
    assert first.tokens != second.tokens  # noise is all there is at this temperature
    assert chat([[1, 2, 3]]).tokens == first.tokens


def test_a_capacity_is_that_of_the_tokens_not_of_their_padding():
    out = gen(model(PLAIN), FULL, [list(range(1, 31))], max_new_tokens=11, capacity=40)
    assert len(out.tokens[0]) == 11 and out.cache.layout.capacity == 40


def test_a_turn_in_a_cache_smaller_than_a_block():
    cache, _ = prefill(FULL, PLAIN, model(PLAIN).params, np.array([[1, 2]]), capacity=12, dtype=jnp.float32)
    assert cache.layout.block == 12
    assert len(generate(model(PLAIN), FULL, [[3]], max_new_tokens=9, cache=cache).tokens[0]) == 9


def test_decoding_begins_with_a_refresh_where_a_block_would_not_fit():
    params, tokens = model(PLAIN).params, prompts()
    cache, _ = prefill(FULL, PLAIN, params, tokens, capacity=160, block=8, dtype=jnp.float32)
    cache, logits = extend(FULL, PLAIN, params, cache, tokens[:, :5])
    refreshed = refresh(FULL, fork(cache))
    found, expected = (
        np.concatenate([new for new, *_ in decode(FULL, PLAIN, params, x, logits, 20)], axis=1) for x in (cache, refreshed)
    )
    np.testing.assert_array_equal(found, expected)


def test_nan_is_no_token():
    broken = jax.tree.map(jnp.copy, model(PLAIN).params)
    broken["norm"] = jax.tree.map(lambda x: x * jnp.nan, broken["norm"])
    with pytest.raises(Fault, match="full: the logits of row 0 are NaN, at prefill"):
        generate(Model(PLAIN, broken), FULL, ROWS, max_new_tokens=4)
    cache, logits = prefill(FULL, PLAIN, model(PLAIN).params, prompts(), capacity=104, block=8, dtype=jnp.float32)
    with pytest.raises(Fault, match="the logits of row 0 are NaN, by decode step 16"):  # the capacity ends after 8
        list(decode(FULL, PLAIN, model(PLAIN).params, cache, logits, 20))


def test_ids_outside_of_the_vocabulary_are_nan_or_refused():
    params = model(PLAIN).params
    for wrong in (-1, 64):
        with pytest.raises(ValueError, match=f"tokens hold id {wrong}: ids lie in 0..63"):
            prefill(FULL, PLAIN, params, np.array([[1, wrong]]))
        cache, _ = prefill(FULL, PLAIN, params, np.array([[1, 2]]))
        _, logits = decode_step(FULL, PLAIN, params, cache, jnp.array([wrong]))
        assert jnp.isnan(logits).all()


@pytest.mark.parametrize(
    "spec, fitted, said",
    [
        ("ojakv:rank=6", "ojakv:rank=2", r"bases.k has 1 heads of \[32, 2\]; ojakv .* takes 1 of \[32, 6\]: calibrate for it"),
        ("static-pca-h:rank=6,heads=joint", "static-pca-h:rank=6", r"takes 1 of \[32, 6\]"),
        ("static-pca-h:rank=6", "eigenattention:rank=6", "bases.k has 1 heads"),
        ("palu:rank=4", "palu:rank=6", r"bases.k has 1 heads of \[32, 6\]; palu .* takes 1 of \[32, 4\]: calibrate for it"),
        ("streamingkv:rank=4,head_group=1", "palu:rank=4", r"takes 4 of \[8, 4\]"),
        ("static-pca-h:rank=6+snapkv:keep=0.5", "static-pca-h:rank=5", r"takes 4 of \[8, 6\]"),
    ],
)
def test_bases_of_another_configuration(spec, fitted, said):
    bases = bases_for(parse_method(fitted), PLAIN)
    with pytest.raises(ValueError, match=said):
        prefill(parse_method(spec), PLAIN, model(PLAIN).params, prompts(), bases=bases)


def test_counts_that_are_not_there():
    params = model(PLAIN).params
    cache, _ = prefill(FULL, PLAIN, params, prompts(), dtype=jnp.float32)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"counts\[1\]={wrong}: 2 tokens were given"):
            extend(FULL, PLAIN, params, cache, jnp.ones((2, 2), jnp.int32), np.array([1, wrong]))
        after, logits = extend(FULL, PLAIN, params, fork(cache), jnp.ones((2, 2), jnp.int32), jnp.array([1, wrong]))
        assert jnp.isnan(logits[1]).all() and jnp.isfinite(logits[0]).all() and 96 <= int(after.length[1]) <= 98
    with pytest.raises(ValueError, match="counts: expected integers, one for each of the 2 rows"):
        extend(FULL, PLAIN, params, cache, jnp.ones((2, 2), jnp.int32), jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"token: expected one for each row"):
        decode_step(FULL, PLAIN, params, cache, jnp.ones((2, 1), jnp.int32))


def shapes_of(cache):
    return jax.tree.structure(cache), [(x.shape, x.dtype) for x in jax.tree.leaves(cache)]


@pytest.mark.parametrize("name", ["streamingllm", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "ojakv"))])
def test_a_thousand_tokens_compile_once(name):
    config = dataclasses.replace(PLAIN, context=2048)
    method = small_configuration(REGISTRY[name])
    bases, tokens = bases_for(method, config), prompts(length=50)
    cache, logits = prefill(method, config, model(config).params, tokens, bases=bases, capacity=1051)
    expected = shapes_of(cache)
    programs, drawn = decode_block._cache_size(), 0
    start = cache
    for new, cache, _ in decode(method, config, model(config).params, start, logits, 1000, bases=bases):
        assert shapes_of(cache) == expected
        assert ((new >= 0) & (new < config.vocab_size)).all()
        drawn += new.shape[1]
    assert drawn == 1000 and cache.length.tolist() == [1049, 1049]
    assert decode_block._cache_size() == programs + 1


def test_loaded_bases_and_weights_that_are_bound_to_a_device_compile_once(tmp_path):
    """Beside what is bound the loop's own results are, too, and were its second turn another program."""
    one = model(PLAIN)
    method = small_configuration(REGISTRY["ojakv"])
    save_bases(tmp_path / "bases", bases_for(method, one.config), one, method)
    bases, programs = load_bases(tmp_path / "bases", one, method), decode_block._cache_size()
    assert not any(x.committed for x in jax.tree.leaves(bases))
    gen(one, method, ROWS, bases=bases, max_new_tokens=30, stop_at_eos=False)
    assert decode_block._cache_size() == programs + 1
    bound = type(one)(one.config, jax.device_put(one.params, jax.devices()[0]))
    gen(bound, method, ROWS, bases=bases, max_new_tokens=30, stop_at_eos=False)
    assert decode_block._cache_size() == programs + 2


@pytest.mark.parametrize("name", ["full", pytest.param("ojakv", marks=pytest.mark.slow)])
def test_by_layers_a_model_of_any_depth_is_one_program(name):
    """And gives the same tokens, rows that end within a block among them."""
    method, asked = small_configuration(REGISTRY[name]), {"max_new_tokens": 40, "temperature": 1.0, "seeds": [1, 2]}
    programs = []
    for layers in (2, 4):
        one = model(dataclasses.replace(PLAIN, num_layers=layers, windows=(None,) * layers, eos_ids=(5,)))
        bases, before = bases_for(method, one.config), layer_extend._cache_size()
        found = generate(one, method, ROWS, bases=bases, by_layers=True, **asked)
        programs.append(layer_extend._cache_size() - before)
        assert found.tokens == generate(one, method, ROWS, bases=bases, **asked).tokens
        assert min(map(len, found.tokens)) < 40
    assert programs == [1, 1]


def test_other_temperatures_compile_nothing():
    drawn, programs = [], []
    for sampling in ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_p": 0.5}, {"temperature": 50.0, "top_p": 0.99}):
        drawn.append(generate(Model(PLAIN, model(PLAIN).params), "full", [[1, 2, 3]], max_new_tokens=12, seeds=1, **sampling).tokens)
        programs.append(decode_block._cache_size())
    assert len(set(programs)) == 1 and drawn[0] != drawn[2]


def test_fewer_prompts_than_rows_compile_nothing(caplog):
    """Whatever is compiled, operation by operation too; each row is as without the others, and so is its next turn."""
    rows, turns = [prompts(1, n, seed=20 + n)[0].tolist() for n in (40, 9, 64, 23)], [[5, 6], [7], [8, 9, 1], [2] * 9]
    shallow, method = model(PLAIN), "snapkv:keep=0.5,sinks=2,recent=8"

    def say(count, **options):
        return gen(shallow, method, rows[:count], max_new_tokens=12, seeds=range(count), temperature=0.7, **options)

    def talk(count):
        first = say(count, batch=4)
        return first, gen(shallow, method, turns[:count], cache=first, max_new_tokens=5)

    def compiled():
        return [record.message for record in caplog.records if "ompil" in record.message]

    four = talk(4)
    with jax.log_compiles():
        three, one = talk(3), talk(1)
        assert not compiled()
        alone = say(3)
        assert compiled()
    for some, others, all_of_them in zip(one, three, four, strict=True):
        assert some.tokens == others.tokens[:1] and others.tokens == all_of_them.tokens[:3]
        assert others.last.tolist() == all_of_them.last.tolist()[:3]
    assert three[0].tokens == alone.tokens and cache_bytes(take_rows(three[0].cache, range(3))) == cache_bytes(alone.cache)
    assert cache_bytes(three[0].cache).smaller == pytest.approx(cache_bytes(alone.cache).smaller, rel=1e-3)
    with pytest.raises(ValueError, match="batch=2: there are 3 prompts; it must be at least that"):
        say(3, batch=2)
    with pytest.raises(ValueError, match="prompts has 4 rows: the conversation that they continue has 3"):
        gen(shallow, method, turns, cache=three[0])


@pytest.mark.parametrize("spec", [
    "streamingllm:budget=24,keep=none",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "ojakv", "single-svd", "minicache")),
])
def test_by_default_there_is_room_for_another_turn(spec):
    """Of `NEXT_TURN` tokens and as long an answer, whatever the method, and not for many more."""
    bases = bases_for(parse_method(spec), PLAIN)
    first = generate(model(PLAIN), spec, ROWS, bases=bases, max_new_tokens=9)
    layout = first.cache.layout
    assert (layout.prompt, layout.capacity, layout.block, layout.dtype) == (64, 64 + 9 + 64 + 9, DEFAULT_BLOCK, "bfloat16")
    turn = [[1] * NEXT_TURN, [2] * NEXT_TURN]
    second = generate(model(PLAIN), spec, turn, bases=bases, max_new_tokens=9, cache=first)
    assert [len(row) for row in second.tokens] == [9, 9]
    with pytest.raises(ValueError, match=r"row 0 would outgrow .*: give `generate` .* capacity=\d+ or more in the first turn"):
        generate(model(PLAIN), spec, turn, bases=bases, max_new_tokens=9, cache=second)


def test_the_default_capacity_ends_with_the_context():
    out = generate(model(PLAIN), FULL, [[1] * 300], max_new_tokens=100)
    assert (out.cache.layout.prompt, out.cache.layout.capacity) == (320, PLAIN.context)


def test_a_row_has_the_slots_that_its_padding_left():
    """The answer to a short prompt in a batch of long ones fills the cache to its capacity."""
    first = gen(model(PLAIN), FULL, [[1] * 64, [2]], max_new_tokens=2, capacity=80)
    assert first.cache.limit.tolist() == [80, 80]
    alone = take_rows(first.cache, [1])
    turn = [[int(first.last[1]), *range(20)]]
    out = gen(model(PLAIN), FULL, turn, max_new_tokens=58, cache=alone)
    whole = gen(model(PLAIN), FULL, [[2, first.tokens[1][0], *turn[0]]], max_new_tokens=58, capacity=128)
    assert out.tokens == whole.tokens and out.cache.length.tolist() == [80]


def test_a_method_may_be_its_spec():
    assert gen(model(PLAIN), "full", ROWS, max_new_tokens=9).tokens == gen(model(PLAIN), FULL, ROWS, max_new_tokens=9).tokens
    with pytest.raises(ValueError, match="unknown method 'ful', did you mean 'full'"):
        gen(model(PLAIN), "ful", ROWS)
    with pytest.raises(TypeError, match="method=3: must be a method, or its spec"):
        gen(model(PLAIN), 3, ROWS)


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([], {}, "prompts is empty"),
        ([[]], {}, r"prompts\[0\] is empty"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1], [3, 64]], {}, r"prompts\[1\] holds id 64: ids lie in 0..63"),
        ([[-1]], {}, r"holds id -1"),
        ("text", {}, "no tokenizer"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1] * 600], {}, r"prompts\[0\] has 600 tokens"),
        ([[1], [1] * 500], {"max_new_tokens": 20}, r"prompts\[1\] has 500 tokens: with max_new_tokens=20 .* may have 492, .* must be at most 12, or"),
        ([[1]], {"max_new_tokens": 600}, "tokens"),
        ([[1]], {"capacity": 3}, "capacity=3: the longest prompt and max_new_tokens=4 need 4"),
        ([[1]], {"capacity": 600}, "the model's context is 512"),
        ([[1] * 20], {"max_new_tokens": 30, "capacity": 40}, "capacity=40: the longest prompt and max_new_tokens=30 need 49"),
        ([[1], [2]], {"seeds": [1, 2, 3]}, "seeds=.1, 2, 3.: give one integer, or one for each of the 2 rows"),
        ([[1]], {"seeds": -1}, r"seeds=-1: must lie in 0\.\."),
        ([[1]], {"seeds": 0.5}, "seeds=0.5: give one integer"),
        ([[1]], {"temperature": 1.0, "top_k": 2.5}, "top_k=2.5: must be an int"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"block": 0}, "block=0"),
    ],
)
def test_bad_input_is_refused_by_name(rows, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model(PLAIN), FULL, rows, **{"max_new_tokens": 4} | options)


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([0, 5], r"lengths\[0\]=0"),
        ([5, 9], r"lengths\[1\]=9: every row needs 1..8"),
        ([5], "one for each of the 2 rows"),
    ],
)
def test_prefill_refuses_lengths_that_do_not_fit(lengths, message):
    with pytest.raises(ValueError, match=message):
        prefill(FULL, PLAIN, model(PLAIN).params, prompts(length=8), jnp.asarray(lengths, jnp.int32))
    with pytest.raises(ValueError, match="non-empty integers"):
        prefill(FULL, PLAIN, model(PLAIN).params, jnp.zeros((2, 0), jnp.int32))
    with pytest.raises(TypeError, match="int8"):
        prefill(FULL, PLAIN, model(PLAIN).params, prompts(length=8), dtype=jnp.int8)


def test_a_turn_that_does_not_fit_is_refused():
    cache = gen(model(PLAIN), FULL, ROWS, max_new_tokens=4, capacity=80).cache
    assert cache.length.tolist() == [40, 8]
    said = "row 1 would outgrow the cache by 2 tokens: give `generate` .or `prefill`. capacity=82 or more in the first turn"
    for turn, new in ((74, 1), (70, 5)):
        with pytest.raises(ValueError, match=said):
            gen(model(PLAIN), FULL, [[1], [1] * turn], cache=cache, max_new_tokens=new)
    with pytest.raises(ValueError, match=said):
        ingest(FULL, PLAIN, model(PLAIN).params, cache, [[1], [1] * 74])
    with pytest.raises(ValueError, match="prompts has 1 rows"):
        gen(model(PLAIN), FULL, [[1]], cache=cache, max_new_tokens=1)
    with pytest.raises(ValueError, match="capacity=400: the conversation goes on in its cache, .* with 80"):
        gen(model(PLAIN), FULL, [[1], [2]], cache=cache, max_new_tokens=1, capacity=400)


class Opening:
    """A tokenizer that puts a token in front of what opens a sequence."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) % 64 for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def test_a_turn_opens_no_sequence():
    talker = dataclasses.replace(Model(PLAIN, model(PLAIN).params), tokenizer=Opening())
    first = generate(talker, "full", ["ab"], max_new_tokens=4)
    by_ids = generate(talker, "full", [[ord("c") % 64, ord("d") % 64]], max_new_tokens=4, cache=first)
    assert generate(talker, "full", ["cd"], max_new_tokens=4, cache=first).tokens == by_ids.tokens
    assert first.cache.length.tolist() == [1 + 2 + 3]
