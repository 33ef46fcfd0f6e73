"""An engine answers what `generate` answers, whoever else is in flight; it compiles nothing new and keeps to its bytes."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import resident_bytes
from helpers import PLAIN, REGISTRY, Model, bases_for, model, prompts, small_configuration
from suites import Letters

import lowrank_kv_jax as lkv
from lowrank_kv_jax.generation.groups import ingest_group
from lowrank_kv_jax.generation.layers import layer_read
from lowrank_kv_jax.method import Layout
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods.parse import as_method, parse_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.serving import Engine, Request
from lowrank_kv_jax.serving.decoding import empty_seats, serve_block
from lowrank_kv_jax.serving.filling import copy_rows
from lowrank_kv_jax.serving.pool import Pool

HERE = Path(__file__).parent
FULL = REGISTRY["full"]()
PROMPT, ROOM, BLOCK = 64, 96, 8
TWO = dataclasses.replace(PLAIN, num_layers=2, windows=(None, None))
SIZES = {"block": BLOCK, "dtype": "float32"}
ROWS = [row[:n] for row, n in zip(prompts(rows=5, length=PROMPT).tolist(), (64, 40, 7, 33, 64), strict=True)]
NEW = (20, 33, 1, 17, 9)
QUICK = ("ojakv",)  # a basis that moves; the full cache is asked below
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(REGISTRY)]
PREFIX, BEHIND = ROWS[0][:50], (ROWS[1][:11], ROWS[2][:1])


def tiny(method="full", **change):
    """A model of one layer, of two where the method stores them together."""
    both = max(map(len, as_method(method).layer_groups(TWO.attention))) > 1
    config = TWO if both else dataclasses.replace(TWO, num_layers=1, windows=(None,))
    return Model(dataclasses.replace(config, **change), model(config).params, Letters())


def bases_of(method):
    return bases_for(method, tiny(method).config)


def engine_of(method, **options):
    sizes = {"slots": 2, "prompt": PROMPT, "room": ROOM, "prefixes": 1, **SIZES}
    return Engine(tiny(method), method, bases=bases_of(method), **sizes | options)


@functools.cache
def full():
    """One for the tests that ask nothing of its method; whoever takes it leaves it idle."""
    return engine_of(FULL, slots=None, memory=210_000)


def answered(engine, requests):
    answers = [engine.submit(request) for request in requests]
    ended = engine.run()
    assert set(ended) == set(answers) and all(answer.done for answer in answers)
    return answers


def expected(method, chunk=None):
    """What `generate` answers to the rows, and to what comes behind the prefix."""
    loaded, bases = tiny(method), bases_of(method)
    options = {"bases": bases, "max_new_tokens": max(NEW), "prefill_chunk": chunk}
    first = lkv.generate(loaded, method, ROWS, capacity=PROMPT + ROOM, **options, **SIZES)
    padded, lengths = np.array([PREFIX + [0] * (PROMPT - len(PREFIX))] * 5), np.array([len(PREFIX)] * 5)
    cache, _ = lkv.prefill(
        method, loaded.config, loaded.params, padded, lengths, bases=bases, capacity=PROMPT + ROOM, chunk=chunk, **SIZES
    )
    second = lkv.generate(loaded, method, (*BEHIND, *ROWS[2:]), cache=cache, **options | {"max_new_tokens": 12})
    return first.tokens, second.tokens[:2]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [None, pytest.param(24, marks=pytest.mark.slow)])
def test_answers_are_those_of_generate(name, chunk):
    method = small_configuration(REGISTRY[name])
    engine, (alone, behind) = engine_of(method, prefill_chunk=chunk), expected(method, chunk)
    requests = [Request(row, max_new_tokens=new) for row, new in zip(ROWS, NEW, strict=True)]
    requests += [Request(row, prefix=PREFIX, max_new_tokens=12) for row in BEHIND]
    answers = answered(engine, requests)
    assert [answer.tokens for answer in answers[:5]] == [row[:new] for row, new in zip(alone, NEW, strict=True)]
    assert [answer.tokens for answer in answers[5:]] == behind
    assert {answer.finish for answer in answers} == {"length"}


# ---- of one method, which the full cache stands for ------------------------------------------------------------------


def test_those_in_flight_wait_for_a_chunk_and_not_for_a_prompt():
    """A prompt of three chunks takes three steps, in each of which a block is decoded; its rows count as bytes."""
    engine = engine_of(FULL, prefill_chunk=24, memory=400_000)
    engine.warm_up()
    short = engine.submit(Request(ROWS[2], max_new_tokens=6 * BLOCK))
    engine.step()
    long, gone = engine.submit(Request(ROWS[0], max_new_tokens=5)), engine.submit(Request(ROWS[4]))
    before, idle, seen = _compiled(), engine.bytes, []
    while not long.tokens:
        engine.step()
        seen.append(len(short.tokens))
        assert engine.bytes > idle or long.tokens
    assert np.diff([1 + BLOCK, *seen]).tolist() == [BLOCK] * 3
    gone.cancel()  # while it waits, or is read
    engine.run()
    assert long.tokens == lkv.generate(
        tiny(), FULL, [ROWS[0]], max_new_tokens=5, capacity=PROMPT + ROOM, prefill_chunk=24, **SIZES).tokens[0]
    assert gone.finish == "cancelled" and engine.bytes == idle <= 400_000 and _compiled() == before


def test_short_prompts_are_not_held_back_by_a_long_one_that_waits():
    engine = engine_of(FULL, prefill_chunk=24)
    long = [engine.submit(Request(ROWS[0], max_new_tokens=3)) for _ in range(2)]
    short = [engine.submit(Request(ROWS[2], max_new_tokens=3)) for _ in range(2)]
    while not all(answer.done for answer in short):
        assert not any(answer.done for answer in long)
        engine.step()
    engine.run()
    assert long[0].tokens == long[1].tokens and len(long[0].tokens) == 3


def _compiled():
    return layer_read._cache_size(), ingest_group._cache_size(), copy_rows._cache_size()


def texts_of(requests, order):
    answers = answered(full(), [requests[i] for i in order])
    return [answers[order.index(i)].tokens for i in range(len(requests))]


def test_answers_do_not_depend_on_who_else_is_in_flight():
    how = zip(NEW, (0, 1, 5, 0.7, 2), (None, 9, None, 3, 40), (1, 1, 0.8, 1, 0.9), strict=True)
    requests = [Request(row, max_new_tokens=new, temperature=heat, top_k=k, top_p=p, seed=i)
                for i, (row, (new, heat, k, p)) in enumerate(zip(ROWS, how, strict=True))]
    requests += [Request(row, prefix=PREFIX, max_new_tokens=9, temperature=1.0) for row in BEHIND]
    found = texts_of(requests, [0, 1, 2, 3, 4, 5, 6])
    assert texts_of(requests, [6, 3, 0, 5, 4, 2, 1]) == found
    own = requests[3]
    asked = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "seeds": own.seed}
    alone = lkv.generate(tiny(), FULL, ROWS, max_new_tokens=own.max_new_tokens, capacity=PROMPT + ROOM, **asked, **SIZES)
    assert alone.tokens[3] == found[3]


def test_a_prefix_that_is_not_kept_gives_the_same_answers():
    requests = [Request(row, prefix=prefix, max_new_tokens=9) for prefix in (PREFIX, ROWS[3]) for row in BEHIND]
    kept = [answer.tokens for answer in answered(full(), requests)]
    once = [dataclasses.replace(request, shared=False) for request in requests]
    none_kept = engine_of(FULL, slots=4, prefixes=0)  # as many rows as `full()` has: its programs
    assert [answer.tokens for answer in answered(none_kept, once)] == kept


def test_a_stop_ends_an_answer_and_is_not_part_of_it():
    whole = answered(full(), [Request(ROWS[0], max_new_tokens=30)])[0]
    at = next(i for i in range(4, 30) if whole.tokens[i] not in whole.tokens[:i])
    word = whole.text[at : at + 2]
    before = whole.text.find(word)
    by_token, by_text, never = answered(full(), [
        Request(ROWS[0], max_new_tokens=30, stop=[whole.tokens[at]]), Request(ROWS[0], max_new_tokens=30, stop=["~~", word]),
        Request(ROWS[0], max_new_tokens=at, stop=[whole.tokens[at]]),
    ])
    assert by_token.finish == "stop" and by_token.tokens == whole.tokens[:at]
    assert by_text.finish == "stop" and by_text.text == whole.text[:before] and by_text.tokens == whole.tokens[: before + 2]
    assert never.finish == "length" and never.tokens == whole.tokens[:at]
    engine = Engine(tiny(eos_ids=(whole.tokens[at],)), FULL, slots=4, prompt=PROMPT, room=ROOM, **SIZES)
    first, second = answered(engine, [Request(ROWS[0], max_new_tokens=30), Request(ROWS[0], max_new_tokens=30, stop_at_eos=False)])
    assert (first.finish, first.tokens, second.tokens) == ("stop", whole.tokens[:at], whole.tokens)


def test_numpys_integers_are_integers():
    engine = engine_of(FULL, prompt=np.array([8, PROMPT]), room=np.int64(ROOM), block=np.int64(BLOCK))
    assert [layout.prompt for layout in engine.layouts] == [8, PROMPT]
    (asked,) = answered(full(), [Request(np.array(ROWS[2]), max_new_tokens=np.int64(9))])
    stops = [np.int64(asked.tokens[4])]
    for stop in (stops, np.array(stops)):
        (answer,) = answered(full(), [Request(ROWS[2], max_new_tokens=9, stop=stop)])
        assert answer.finish == "stop" and answer.tokens == asked.tokens[: asked.tokens.index(stops[0])]
    assert asked.prompt == tuple(ROWS[2]) and all(type(size) is int for size in dataclasses.astuple(engine.layouts[0])[1:5])


def test_tokens_are_told_as_they_come_and_a_failing_listener_ends_its_own_request_alone():
    told, engine = [], full()

    def listen(answer, new):
        told.append((answer, list(new)))

    def fail(answer, new):
        if len(answer.tokens) > 1:
            raise KeyError("gone")

    heard, failing = (engine.submit(Request(ROWS[0], max_new_tokens=20, on_tokens=on)) for on in (listen, fail))
    short = engine.submit(Request(ROWS[1], max_new_tokens=2))  # ends in the step that raises
    with pytest.raises(KeyError, match="gone"):
        engine.run()
    assert {*engine.run()} == {heard, failing, short}
    assert [len(new) for _, new in told] == [1, BLOCK, BLOCK, 3] and sum((new for _, new in told), []) == heard.tokens
    assert heard.finish == "length" and failing.finish == "cancelled" and len(failing.tokens) == 1 + BLOCK
    assert heard.submitted_s < heard.first_s < heard.finished_s


def test_an_engine_that_failed_takes_no_more_steps(monkeypatch):
    engine = full.__wrapped__()  # of its own
    engine.submit(Request(ROWS[0], max_new_tokens=4))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Pool, "seat", lambda *_: 1 / 0)
        engine.run()
    engine.submit(Request(ROWS[1], max_new_tokens=4))
    with pytest.raises(RuntimeError, match="this engine has failed .ZeroDivisionError"):
        engine.run()


def test_an_engine_that_was_interrupted_takes_no_more_steps(monkeypatch):
    """By Ctrl-C, behind a block that was decoded and not read: another step would draw from tokens that rows hold already."""
    def interrupted(_):
        raise KeyboardInterrupt

    engine = full.__wrapped__()
    engine.submit(Request(ROWS[0], max_new_tokens=40))
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lowrank_kv_jax.serving.pool.to_host", interrupted)
        engine.run()
    with pytest.raises(RuntimeError, match="this engine has failed .KeyboardInterrupt"):
        engine.run()


def test_cancelling_frees_the_row():
    engine = full()
    many = [engine.submit(Request(ROWS[i % 5], max_new_tokens=60)) for i in range(sum(engine.slots) + 3)]
    engine.step()
    assert (engine.in_flight, engine.waiting) == (sum(engine.slots), 3)
    for i in (0, -1):  # one in flight, one that waits behind others
        many[i].cancel()
    ended = engine.step()
    assert many[0] in ended and len(many[0].tokens) == 1 + BLOCK and many[-1] in ended and engine.waiting == 1
    assert many[-3].tokens and engine.in_flight == sum(engine.slots)
    engine.run()
    assert [answer.finish for answer in many] == ["cancelled", *["length"] * (len(many) - 2), "cancelled"]
    assert many[-1].tokens == []


def test_few_prompts_a_step_let_those_in_flight_go_on():
    engine = engine_of(FULL, slots=4, prefixes=0, admits=1)
    answers = [engine.submit(Request(row, max_new_tokens=20)) for row in ROWS[:3]]
    engine.step()
    assert [len(answer.tokens) for answer in answers] == [1 + BLOCK, 0, 0]
    engine.step()
    assert [len(answer.tokens) for answer in answers] == [1 + 2 * BLOCK, 1 + BLOCK, 0]
    engine.run()


def test_a_row_whose_logits_are_nan_ends_alone():
    engine = full()
    broken, good = (engine.submit(Request(row, max_new_tokens=20)) for row in ROWS[:2])
    engine.step()
    pool = engine._pools[0]
    pool._cache = dataclasses.replace(pool._cache, length=pool._cache.length.at[0].set(PROMPT + ROOM))
    engine.run()
    assert (broken.finish, broken.error, good.finish) == ("fault", "full: the logits are NaN", "length")
    assert len(broken.tokens) == 1 + BLOCK
    again = answered(engine, [Request(ROWS[0], max_new_tokens=20)])[0]
    assert again.tokens == answered(full(), [Request(ROWS[0], max_new_tokens=20)])[0].tokens and again.finish == "length"


# ---- bytes and programs ----------------------------------------------------------------------------------------------


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


@contextlib.contextmanager
def programs():
    """Names of what is compiled within."""
    found = []

    def listen(name, seconds, **about):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found


def some(count, seed=0):
    """Requests of all kinds."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        row = rng.integers(0, 60, rng.integers(1, PROMPT + 1)).tolist()
        kind = {"max_new_tokens": int(rng.integers(1, 24)), "seed": i, "temperature": float(rng.choice([0, 1])), "stop": [5] * (i % 2)}
        yield Request(row[:20], prefix=ROWS[i % 3], **kind) if i % 3 == 0 else Request(row, **kind)


def serve_many(engine, count):
    """Serve them a few at a time; bytes of what exists beside what there was."""
    engine.warm_up()
    most, before, answers = 0, live_bytes() - engine.bytes, []
    with programs() as compiled:
        for i, request in enumerate(some(count)):
            answers.append(engine.submit(request))
            if i % 7 == 0:
                engine.step()
                most = max(most, live_bytes() - before)
            if i % 11 == 0:
                answers[-1].cancel()
        engine.run()
    assert all(answer.done for answer in answers)
    assert not compiled
    return most


def test_nothing_is_compiled_and_no_byte_goes_beyond_the_budget():
    engine = full()
    assert sum(engine.slots) == 4 and engine.bytes <= engine.memory < engine.bytes + 2 * 10**4
    assert engine.bytes <= serve_many(engine, 30) <= engine.memory


@pytest.mark.parametrize("prompt, room", [pytest.param(64, 16, marks=pytest.mark.slow), (48, 12)])
def test_prompts_in_chunks_compile_nothing_after_a_warm_up(prompt, room):
    """Of any length, and behind a prefix of any."""
    engine = engine_of(FULL, prompt=prompt, room=room, prefill_chunk=min(64, prompt + 16), block=16)
    engine.warm_up()
    with programs() as compiled:
        for prefix, behind in ((1, prompt - 6), (3, 1), (20, 5), (41, 5)):
            engine.submit(Request([1] * behind, prefix=[1] * prefix, max_new_tokens=2))
            engine.run()
    assert not compiled


def test_weights_bound_to_a_device_compile_nothing_after_a_warm_up():
    """A block of an empty cache is that of a filled one."""
    plain = tiny()
    bound = Model(plain.config, jax.device_put(plain.params, jax.devices()[0]), plain.tokenizer)
    engine = Engine(bound, FULL, slots=2, prompt=PROMPT, room=ROOM, prefixes=1, **SIZES)
    engine.warm_up()
    with programs() as compiled:
        answered(engine, [Request(ROWS[1], max_new_tokens=2 * BLOCK), Request(BEHIND[0], prefix=PREFIX, max_new_tokens=2)])
    assert not compiled


def test_no_program_copies_the_cache():
    """Temporaries of a block do not grow with the cache, and those of a copied row are no more than a row."""
    found = []
    for capacity in (4001, 16007):
        config = dataclasses.replace(tiny().config, context=capacity)
        shapes = abstract_cache(FULL, Layout(config.attention, 4, PROMPT, capacity, BLOCK, "float32"))
        held, at = cache_bytes(shapes).total, np.zeros(1, np.int32)
        block = serve_block.lower(FULL, config, tiny().params, shapes, empty_seats(4, 2)).compile().memory_analysis()
        copy = copy_rows.lower(shapes, at, shapes, at).compile().memory_analysis()
        assert block.alias_size_in_bytes >= held and copy.alias_size_in_bytes >= held
        assert copy.temp_size_in_bytes < held / 4 + 4096
        found.append(block.temp_size_in_bytes)
    assert found[0] == found[1]


@pytest.mark.slow
def test_two_thousand_requests_leave_nothing_behind():
    engine = engine_of(parse_method("kivi:bits=4,sinks=4,recent=8"), slots=None, memory="100KB", prompt=(PROMPT // 2, PROMPT))
    serve_many(engine, 50)
    before, live = resident_bytes(), live_bytes()
    most = serve_many(engine, 2000)
    assert most <= engine.memory and live_bytes() == live
    assert resident_bytes() - before < 50e6


@pytest.mark.slow
def test_an_engine_on_a_mesh_answers_alike():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64"}
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    done = subprocess.run([sys.executable, str(HERE / "on_a_mesh.py")], env=env | {"PYTHONPATH": os.pathsep.join(paths)},
                          capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["full:model", "xkv:model", "kivi:model", "full:tokens", "chunks"]
