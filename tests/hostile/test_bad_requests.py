"""Engines and requests by the table: what is asked, and words of the refusal. Nothing is compiled but shapes."""

import functools

import helpers
import numpy as np
import pytest
from refusing import refused

from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.serving import Engine, Request

HUGE, KVZIP = 10**12, parse_method("kvzip:keep=0.5")


def engine(method="full", **options):
    return Engine(helpers.model(), method, **{"slots": 1, "prompt": 32, "room": 16, "block": 8} | options)


def request(prompt=(1, 2), **options):
    return Request(prompt, **options)


@functools.cache
def small():
    return engine(prompt=(16, 32))


def submit(request):
    return small().submit(request)


def ask(prompt=(1, 2), **options):
    return small().submit(Request(prompt, **options))


TABLE = (
    (engine, {"method": "nothing"}, "unknown method 'nothing'"),
    (engine, {"method": "ojakv"}, "method 'ojakv' needs calibrated bases"),
    (engine, {"method": KVZIP, "bases": helpers.bases_for(KVZIP), "prompt": 300}, "a prompt of 300 tokens, read twice, needs 600 positions"),
    (engine, {"memory": "lots"}, "memory='lots': must be a number and its unit, such as '256MiB'"),
    (engine, {"memory": 0}, "memory=0: must be at least 1"),
    (engine, {"memory": "4KiB"}, "memory: 4096 bytes are left for rows, one of each length takes 18504; give 14408 more"),
    (engine, {"slots": 0}, "slots=0: must be at least 1"),
    (engine, {"slots": 1.5}, "slots=1.5: must be an int"),
    (engine, {"mesh": "data=1"}, "mesh='data=1': must be a jax.sharding.Mesh"),
    (engine, {"prefixes": -1}, "prefixes=-1: must be at least 0"),
    (engine, {"admits": 0}, "admits=0: must be at least 1"),
    (engine, {"prefill_chunk": 0}, "prefill_chunk=0: must be at least 1"),
    (engine, {"prefill_chunk": "all"}, "prefill_chunk='all': must be an int"),
    (engine, {"method": KVZIP, "bases": helpers.bases_for(KVZIP), "prompt": 480, "prefill_chunk": 64},
     "a prompt of 480 tokens, read twice, needs 544 positions"),
    (engine, {"prompt": 0}, "prompt=0: must be at least 1"),
    (engine, {"prompt": ()}, "prompt=(): must be a length, or several that differ"),
    (engine, {"prompt": (8, 8)}, "prompt=(8, 8): must be a length, or several that differ"),
    (engine, {"prompt": "long"}, "prompt='long': must be an int"),
    (engine, {"prompt": np.array(8)}, "prompt=array(8): must be an int"),
    (engine, {"prompt": np.array([0.5])}, "prompt=np.float64(0.5): must be an int"),
    (engine, {"prompt": None}, "prompt=None: must be an int"),
    (engine, {"prompt": 512}, "prompt=512: the model's context is 512 tokens"),
    (engine, {"prompt": 500}, "prompt=500: with room=16 behind it more than the model's context of 512 tokens"),
    (engine, {"room": 0}, "room=0: must be at least 1"),
    (engine, {"room": HUGE}, "room=1000000000000: must be at most 268435456"),
    (engine, {"block": 0}, "block=0: must be at least 1"),
    (engine, {"dtype": "int8"}, "dtype='int8': must be a floating dtype, such as bfloat16, float16, float32"),
    (engine, {"dtype": "float64"}, "dtype='float64': JAX would hold float32"),
    (request, {"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
    (request, {"temperature": -1}, "temperature=-1: must be at least 0"),
    (request, {"top_k": 0}, "top_k=0: must be at least 1"),
    (request, {"top_p": 2}, "top_p=2: must lie in (0, 1]"),
    (request, {"seed": -1}, "seed=-1: must be at least 0"),
    (request, {"seed": 2**32}, "seed=4294967296: must be at most 4294967295"),
    (request, {"seed": [1]}, "seed=[1]: must be an int"),
    (request, {"stop": "end"}, "stop='end': must be a list of tokens, or of texts that are not empty"),
    (request, {"stop": [""]}, "stop=['']: must be a list of tokens"),
    (request, {"stop": [1.5]}, "stop=[1.5]: must be a list of tokens"),
    (request, {"stop": [True]}, "stop=[True]: must be a list of tokens"),
    (request, {"stop": b"end"}, "stop=b'end': must be a list of tokens"),
    (request, {"stop": np.array(3)}, "stop=array(3): must be a list of tokens"),
    (request, {"stop": np.array([0.5])}, "stop=array([0.5]): must be a list of tokens"),
    (request, {"stop": 3}, "stop=3: must be a list of tokens"),
    (request, {"stop": list(range(9))}, "must be at most 8 tokens and texts"),
    (request, {"on_tokens": 5}, "on_tokens=5: must be callable, or None"),
    (submit, {"request": "a text"}, "request='a text': must be a Request"),
    (ask, {"prompt": ()}, "prompt is empty"),
    (ask, {"prompt": b"ab"}, "prompt=b'ab': must be a text, or a row of ids, which are ints"),
    (ask, {"prompt": [True]}, "prompt=[True]: must be a text, or a row of ids"),
    (ask, {"prefix": {1: 2}}, "prefix={1: 2}: must be a text, or a row of ids"),
    (ask, {"prompt": "a text"}, "this model has no tokenizer"),
    (ask, {"prompt": [64]}, "prompt holds id 64: ids lie in 0..63"),
    (ask, {"stop": np.array([64])}, "stop holds id 64: ids lie in 0..63"),
    (ask, {"stop": [64]}, "stop holds id 64: ids lie in 0..63"),
    (ask, {"stop": ["x"]}, "this model has no tokenizer: give stop as ids"),
    (ask, {"prompt": [1] * 33}, "prompt has 33 tokens: this engine takes 32 (prompt=)"),
    (ask, {"prefix": [99]}, "prefix holds id 99: ids lie in 0..63"),
    (ask, {"prefix": []}, "prefix is empty: every prompt needs at least one token"),
    (ask, {"prefix": [1] * 33}, "prefix has 33 tokens: this engine takes 32 (prompt=)"),
    (ask, {"prefix": [1], "prompt": [1] * 48}, "max_new_tokens=64: with 49 tokens before them 112 must fit; a row takes 48 (room=)"),
    (ask, {"prompt": [1] * 32, "max_new_tokens": 18}, "max_new_tokens=18: with 32 tokens before them 49 must fit; a row takes 48"),
)


@pytest.mark.parametrize("call, arguments, words", TABLE, ids=[words for *_, words in TABLE])
def test_arguments(call, arguments, words):
    refused(lambda: call(**arguments), words, errors=(ValueError, TypeError))


def test_a_request_that_just_fits_is_taken():
    assert not ask([1] * 32, max_new_tokens=17).done and small().waiting == 1
