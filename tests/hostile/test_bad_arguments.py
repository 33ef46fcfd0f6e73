"""Arguments of the library by the table: what is called with what, and words of the refusal. Nothing is compiled."""

import dataclasses
import math
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from refusing import refused
from suites import Letters

import lowrank_kv_jax as lib
from lowrank_kv_jax import methods
from lowrank_kv_jax.calibration.corpus import Corpus, token_windows
from lowrank_kv_jax.files import behind_links, read_text, replacing
from lowrank_kv_jax.generation.generate import row_seeds
from lowrank_kv_jax.method.cache import fork, take_rows, with_token_layout
from lowrank_kv_jax.models.decoder import init_params
from lowrank_kv_jax.saving.saved_bases import save_bases
from lowrank_kv_jax.storage.sharding import make_mesh

INF, NAN, HUGE = math.inf, math.nan, 10**12
SPEC, FULL = helpers.PLAIN.attention, methods.Full()
ROPE = {"theta": 10000.0, "rotary_dim": 8}


def generate(prompts=((1, 2),), **options):
    return lib.generate(helpers.model(), FULL, prompts, **{"max_new_tokens": 4} | options)


def ask(prompts):
    return lib.generate(helpers.Model(helpers.PLAIN, helpers.model().params, Letters()), FULL, prompts)


def calibrate(texts):
    return lib.calibrate(helpers.model(), "ojakv", texts)


def prefill(tokens=((1, 2, 3),), *rest, **options):
    return lib.prefill(FULL, helpers.PLAIN, helpers.model().params, tokens, *rest, **options)


def plan(method="full", **options):
    return lib.plan_layers(method, SPEC, **{"prompt": 64} | options)


def spec(**change):
    return dataclasses.replace(SPEC, **change)


def rope(**change):
    return lib.RopeSpec(**ROPE | change)


def layout(**change):
    return lib.Layout(**{"spec": SPEC, "batch": 1, "prompt": 8, "capacity": 16, "block": 4, "dtype": "float32"} | change)


def windows(length, count, texts=("a few words",)):
    return token_windows(Characters(), texts, length, count)


TABLE = (  # call, arguments, words
    (generate, {"prompts": ()}, "prompts is empty: give at least one"),
    (generate, {"prompts": 5}, "prompts=5: must be a text, several, or rows of ids"),
    (generate, {"prompts": [5]}, "prompts[0]=5: must be a text, or a row of ids"),
    (generate, {"prompts": [[]]}, "prompts[0] is empty: every prompt needs at least one token"),
    (generate, {"prompts": [[1], [1.5]]}, "prompts[1]=[1.5]: must be a text, or a row of ids"),
    (generate, {"prompts": [[None]]}, "prompts[0]=[None]: must be"),
    (generate, {"prompts": np.zeros((1, 2, 2), int)}, "prompts[0]=array([[0, 0],        [0, 0]]): must be a text, or a row"),
    (generate, {"prompts": b"ab"}, "prompts=b'ab': must be a text, several, or rows of ids"),
    (generate, {"prompts": {1: 2}}, "prompts={1: 2}: must be a text, several, or rows of ids"),
    (generate, {"prompts": [b"\1\2"]}, "prompts[0]=b'\\x01\\x02': must be a text, or a row of ids"),
    (generate, {"prompts": [{1: 2}]}, "prompts[0]={1: 2}: must be a text, or a row of ids"),
    (generate, {"prompts": [{1, 2}]}, "prompts[0]={1, 2}: must be a text, or a row of ids"),
    (generate, {"prompts": [[True, False]]}, "prompts[0]=[True, False]: must be a text, or a row of ids"),
    (generate, {"prompts": [[np.True_]]}, "prompts[0]=[np.True_]: must be a text, or a row of ids"),
    (ask, {"prompts": "a\ud800"}, "prompts[0]='a\\ud800': is not UTF-8 text, character 1 is half of a surrogate pair"),
    (generate, {"prompts": [[64]]}, "prompts[0] holds id 64: ids lie in 0..63"),
    (generate, {"prompts": [[-1]]}, "prompts[0] holds id -1: ids lie in 0..63"),
    (generate, {"prompts": [[10**5000]]}, "prompts[0] holds id an integer of thousands of digits: ids lie in 0..63"),
    (generate, {"prompts": "a text"}, "this model has no tokenizer: give prompts as lists of ids"),
    (generate, {"prompts": [[1] * 510]}, "with max_new_tokens=4 it may have 508, for the model's context is 512; max_new_tokens "
                                         "must be at most 2, or the prompt shorter"),
    (generate, {"prompts": [[1] * 600]}, "prompts[0] has 600 tokens: with max_new_tokens=4 it may have 508"),
    (generate, {"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
    (generate, {"max_new_tokens": -5}, "max_new_tokens=-5: must be at least 1"),
    (generate, {"max_new_tokens": HUGE}, "max_new_tokens=1000000000000: must be at most 268435456"),
    (generate, {"max_new_tokens": 10**6}, "max_new_tokens=1000000: must be at most 511"),
    (generate, {"max_new_tokens": 2.5}, "max_new_tokens=2.5: must be an int of at least 1"),
    (generate, {"max_new_tokens": "4"}, "max_new_tokens='4': must be an int"),
    (generate, {"max_new_tokens": True}, "max_new_tokens=True: must be an int"),
    (generate, {"prefill_chunk": 0}, "prefill_chunk=0: must be at least 1"),
    (generate, {"prefill_chunk": 2.5}, "prefill_chunk=2.5: must be an int of at least 1"),
    (prefill, {"chunk": 0}, "chunk=0: must be at least 1"),
    (generate, {"temperature": -1}, "temperature=-1: must be at least 0"),
    (generate, {"temperature": NAN}, "temperature=nan: must be a finite number"),
    (generate, {"temperature": INF}, "temperature=inf: must be a finite number"),
    (generate, {"temperature": 1e-300}, "temperature=1e-300: must be 0, which is greedy, or at least 1e-06"),
    (generate, {"temperature": "hot"}, "temperature='hot': must be a number"),
    (generate, {"top_k": 0}, "top_k=0: must be at least 1"),
    (generate, {"top_k": 2.5}, "top_k=2.5: must be an int"),
    (generate, {"top_p": 0}, "top_p=0: must lie in (0, 1]"),
    (generate, {"top_p": 1.5}, "top_p=1.5: must lie in (0, 1]"),
    (generate, {"top_p": NAN}, "top_p=nan: must be a finite number"),
    (generate, {"seeds": -1}, "seeds=-1: must lie in 0..2**32 - 1"),
    (generate, {"seeds": 2**32}, "seeds=4294967296: must lie in 0..2**32 - 1"),
    (generate, {"seeds": [1, 2]}, "seeds=[1, 2]: give one integer, or one for each of the 1 rows"),
    (generate, {"seeds": 0.5}, "seeds=0.5: give one integer"),
    (generate, {"seeds": "x"}, "seeds='x': give one integer"),
    (generate, {"seeds": [[1], [2, 3]]}, "seeds=[[1], [2, 3]]: must be an array"),
    (generate, {"seeds": jax.random.key(0)}, "give one integer, or one for each of the 1 rows"),
    (generate, {"on_tokens": 3}, "on_tokens=3: must be callable, or None"),
    (generate, {"mesh": "data=1"}, "mesh='data=1': must be a jax.sharding.Mesh with axes of"),
    (prefill, {"mesh": "data=1"}, "mesh='data=1': must be a jax.sharding.Mesh"),
    (plan, {"mesh": "data=1"}, "mesh='data=1': must be a jax.sharding.Mesh"),
    (make_mesh, {"text": "data=²"}, "mesh 'data=²': expected axis=size"),
    (lib.generate, {"model": "smollm2-135m", "method": FULL, "prompts": "x"}, "model='smollm2-135m': has no config, params, tokenizer"),
    (lib.calibrate, {"model": "smollm2-135m", "method": "ojakv"}, "model='smollm2-135m': has no config"),
    (lib.compose, {"codec": methods.KIVI}, "is no codec"),
    (lib.fork, {"cache": 3}, "cache is a int: must be a cache, such as `.cache` of a Generation"),
    (lib.cache_bytes, {"cache": "x"}, "cache is a str: must be a cache"),
    (generate, {"dtype": "nonsense"}, "dtype='nonsense': must be a floating dtype, such as bfloat16, float16, float32"),
    (generate, {"dtype": "float64"}, "dtype='float64': JAX would hold float32, as jax_enable_x64 is off; must be a floating dtype of at most 32 bits"),
    (prefill, {"dtype": np.float64}, "dtype=<class 'numpy.float64'>: JAX would hold float32"),
    (plan, {"dtype": "float64"}, "dtype='float64': JAX would hold float32"),
    (layout, {"dtype": "float64"}, "dtype='float64': JAX would hold float32"),
    (lib.calibrate, {"model": helpers.model(), "method": "ojakv", "dtype": "float64"}, "dtype='float64': JAX would hold float32"),
    (init_params, {"config": helpers.PLAIN, "key": jax.random.key(0), "dtype": "float64"}, "dtype='float64': JAX would hold float32"),
    (lib.calibrate, {"model": helpers.model(), "method": "ojakv", "dtype": "int8"}, "dtype='int8': must be a floating dtype"),
    (lib.calibrate, {"model": helpers.model(), "method": "ojakv", "dtype": "no"}, "dtype='no': must be a floating dtype"),
    (lib.generate, {"model": helpers.model(), "method": "ojakv", "prompts": [[1]], "bases": 3}, "bases=3: must be what `calibrate` or `load_bases` returns"),
    (lib.generate, {"model": helpers.model(), "method": "ojakv", "prompts": [[1]], "bases": [1] * 3}, "bases[0] is a int: method 'ojakv' takes Bases, which"),
    (generate, {"block": 0}, "block=0: must be at least 1"),
    (generate, {"block": -4}, "block=-4: must be at least 1"),
    (generate, {"block": HUGE}, "block=1000000000000: must be at most 268435456"),
    (generate, {"capacity": 0}, "capacity=0: must be at least 1"),
    (generate, {"capacity": 3}, "capacity=3: the longest prompt and max_new_tokens=4 need 5"),
    (generate, {"capacity": 513}, "capacity=513: the model's context is 512 tokens"),
    (generate, {"capacity": "all"}, "capacity='all': must be an int"),
    (prefill, {"tokens": ()}, "tokens: expected non-empty integers [batch, length], got float64(0,)"),
    (prefill, {"tokens": [[]]}, "tokens: expected non-empty integers"),
    (prefill, {"tokens": [[0.5]]}, "tokens: expected non-empty integers [batch, length], got float64(1, 1)"),
    (prefill, {"tokens": [1, 2]}, "tokens: expected non-empty integers [batch, length], got int64(2,)"),
    (prefill, {"tokens": [[1], [2, 3]]}, "tokens=[[1], [2, 3]]: must be an array, all rows of one length"),
    (prefill, {"tokens": [[64]]}, "tokens hold id 64: ids lie in 0..63"),
    (prefill, {"lengths": np.array([0])}, "lengths[0]=0: every row needs 1..3 tokens"),
    (prefill, {"lengths": np.array([4])}, "lengths[0]=4: every row needs 1..3 tokens"),
    (prefill, {"lengths": np.array([1, 1])}, "lengths: expected integers, one for each of the 1 rows"),
    (prefill, {"lengths": np.array([1.0])}, "lengths: expected integers, one for each of the 1 rows, got float64(1,)"),
    (prefill, {"capacity": 2}, "capacity=2: the prompt has 3 tokens; capacity must be at least that"),
    (prefill, {"capacity": HUGE}, "capacity=1000000000000: must be at most 268435456"),
    (prefill, {"block": 0}, "block=0: must be at least 1"),
    (plan, {"method": "nothing"}, "unknown method 'nothing'"),
    (plan, {"method": "ojakv"}, "method 'ojakv' needs calibrated bases: pass bases=calibrate(model, method)"),
    (plan, {"prompt": 0}, "prompt=0: must be at least 1; what is appended needs something to be appended to"),
    (plan, {"prompt": -1}, "prompt=-1: must be at least 1"),
    (plan, {"prompt": HUGE}, "prompt=1000000000000: must be at most 268435456"),
    (plan, {"prompt": 1.5}, "prompt=1.5: must be an int"),
    (plan, {"capacity": 0}, "capacity=0: must be at least 1"),
    (plan, {"capacity": 63}, "capacity=63: the prompt has 64 tokens; capacity must be at least that"),
    (plan, {"capacity": 513}, "capacity=513: the model's context is 512 tokens"),
    (plan, {"block": 0}, "block=0: must be at least 1"),
    (plan, {"block": HUGE}, "block=1000000000000: must be at most 268435456"),
    (plan, {"method": "xkv:group=2,table=1:2"}, "table='1:2': has 1 entries, this model has 2 groups"),
    (plan, {"method": "xkv:table=x"}, "table='x': expected a pair k:v for each group"),
    (plan, {"method": "palu:head_group=3", "bases": ()}, "head_group=3: must divide the model's 4 kv heads: 1, 2, 4"),
    (plan, {"method": "ojakv:rank=9,heads=per_head", "bases": ()}, "rank=9: must lie in 1..8, the width of the basis"),
    (plan, {"method": "transform:group=4", "bases": ()}, "group=4: the model has 3 layers"),
    (plan, {"method": "kivi:keys=per_token,group=16"}, "group=16: must lie in 1..8, the head's channels, or be None"),
    (layout, {"batch": 0}, "batch=0: must be at least 1"),
    (layout, {"prompt": -1}, "prompt=-1: must be at least 0"),
    (layout, {"capacity": 7}, "capacity=7: the prompt has 8 tokens"),
    (layout, {"capacity": HUGE}, "capacity=1000000000000: must be at most 268435456"),
    (layout, {"block": NAN}, "block=nan: must be an int of at least 1"),
    (layout, {"tokens": "piles"}, "tokens='piles': allowed are rows, lanes"),
    (spec, {"num_layers": 0}, "num_layers=0: must be a positive integer"),
    (spec, {"q_heads": 3}, "q_heads=3: must be a multiple of kv_heads=4"),
    (spec, {"kv_heads": -4}, "kv_heads=-4: must be a positive integer"),
    (spec, {"head_dim": 2.0}, "head_dim=2.0: must be a positive integer"),
    (spec, {"head_dim": 4}, "rope.rotary_dim=8: must be at most head_dim=4"),
    (spec, {"context": HUGE}, "context=1000000000000: must be at most 2147483647"),
    (spec, {"context": True}, "context=True: must be a positive integer"),
    (spec, {"windows": (None,)}, "windows=(None,): must hold one entry for each of 3 layers"),
    (spec, {"windows": (0, None, None)}, "windows[0]=0: must be a positive integer"),
    (rope, {"theta": 0.0}, "rope theta 0.0: must be a finite number above 1"),
    (rope, {"theta": 1.0}, "rope theta 1.0: must be a finite number above 1"),
    (rope, {"theta": NAN}, "rope theta nan: must be a finite number above 1"),
    (rope, {"theta": 1e300}, "rope theta 1e+300: must be a finite number above 1 and at most 1e+15"),
    (rope, {"rotary_dim": 7}, "rotary_dim must be a positive even number of at most 65536, got 7"),
    (rope, {"rotary_dim": HUGE}, "rotary_dim must be a positive even number of at most 65536, got 1000000000000"),
    (rope, {"factor": INF}, "rope factor inf: must be a finite number of at least 1"),
    (rope, {"factor": 0.0}, "rope factor 0.0: must be a finite number of at least 1"),
    (rope, {"scaling": "other"}, "rope scaling 'other' is not one of 'default', 'linear', 'llama3', 'yarn'"),
    (rope, {"scaling": "llama3", "low_freq_factor": 4.0}, "low_freq_factor 4.0, high_freq_factor 4.0: must be finite"),
    (rope, {"scaling": "llama3", "high_freq_factor": INF}, "high_freq_factor inf: must be finite"),
    (rope, {"scaling": "yarn", "beta_slow": 32.0}, "beta_slow 32.0, beta_fast 32.0: must be finite"),
    (rope, {"scaling": "yarn", "beta_slow": 1e-320}, "beta_slow 1e-320"),
    (rope, {"scaling": "yarn", "original_context": 0}, "original_context 0: must lie in 1..2147483647"),
    (lib.Sampler, {"temperature": None}, "temperature=None: must be a number"),
    (lib.Sampler, {"temperature": np.float32(NAN)}, "temperature=nan: must be a finite number"),
    (lib.compose, {}, "compose needs at least a codec, a selection or a reading"),
    (lib.compose, {"codec": FULL, "summary": lib.parse_method("h2o:keep=0.5+moments").summary}, "nothing is evicted"),
    (lib.parse_method, {"text": "full+"}, "unknown method ''"),
    (lib.load_corpus, {"source": "none.txt"}, "corpus 'none.txt': no such file, not one of pydoc,"),
    (lib.load_corpus, {"source": []}, "corpus '': holds no text"),
    (lib.load_corpus, {"source": "/dev/zero"}, "/dev/zero: is a character device; give a regular file"),
    (lib.load_corpus, {"source": "~no-such-user/x.txt"}, "corpus '~no-such-user/x.txt': no such file"),
    (Corpus.of, {"texts": []}, "corpus 'texts': holds no text"),
    (calibrate, {"texts": Path("a.txt")}, "corpus 'texts' holds PosixPath('a.txt'): must be a sequence of strings, the texts themselves; `load_corpus`"),
    (calibrate, {"texts": "a.txt"}, "corpus 'texts' holds 'a.txt': must be a sequence of strings"),
    (calibrate, {"texts": [Path("a.txt")]}, "corpus 'texts' holds PosixPath('a.txt'): must be a sequence of strings"),
    (calibrate, {"texts": 5}, "corpus 'texts' holds 5: must be a sequence of strings"),
    (Corpus.of, {"texts": ["a", "\ud800"]}, "corpus 'texts' holds '\\ud800': is not UTF-8 text, character 0 is half of"),
    (Corpus.of, {"texts": [" ", "\n"]}, "corpus 'texts': holds no text"),
    (windows, {"length": 0, "count": 1}, "length=0, windows=1: must both be at least 1"),
    (windows, {"length": 4, "count": -1}, "length=4, windows=-1: must both be at least 1"),
    (windows, {"length": HUGE, "count": 1}, "must be at most"),
    (windows, {"length": 4, "count": 1, "texts": ()}, "the corpus has 0 tokens"),
    (lib.load_model, {"source": ""}, "source='': must be a path, a hub id or 'smollm2-135m'"),
    (lib.load_model, {"source": None}, "source=None: must be a path"),
    (lib.load_model, {"source": "smollm3", "mesh": "data=1"}, "mesh='data=1': must be a jax.sharding.Mesh"),
    (lib.load_model, {"source": "no/such/place/here"}, "model 'no/such/place/here': no such file or directory"),
    (lib.load_model, {"source": "smollm3"}, "model 'smollm3': no such file or directory, and neither the name"),
    (lib.load_model, {"source": "x\0y"}, "'x\\x00y': holds a NUL, which no path can"),
    (lib.load_model, {"source": __file__}, "test_bad_arguments.py: a model is a directory or a .gguf file"),
    (lib.load_cache, {"path": "none", "method": FULL, "model": None}, "none: no saved cache here (lowrank_kv.json is missing)"),
    (lib.load_bases, {"path": "none", "method": FULL, "model": None}, "none: no saved bases here (lowrank_kv.json is missing)"),
    (lib.load_bases, {"path": "x\0", "method": FULL, "model": None}, "holds a NUL"),
    (save_bases, {"path": "none", "bases": (), "model": helpers.model(), "method": FULL}, "method 'full' has no calibrated bases"),
    (row_seeds, {"seeds": [[1]], "rows": 1}, "seeds=[[1]]: give one integer, or one for each of the 1 rows"),
    (behind_links, {"path": ""}, "path='': must not be empty"),
    (behind_links, {"path": "a\0b"}, "'a\\x00b': holds a NUL, which no path can"),
    (read_text, {"path": "/dev/full"}, "/dev/full: is a character device"),
    (lambda path: replacing(path).__enter__(), {"path": "/dev/null"}, "/dev/null: is a character device; give a regular file"),
)


@pytest.mark.parametrize("call, arguments, words", TABLE, ids=[words for *_, words in TABLE])
def test_arguments(call, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(lambda: call(**arguments), words, errors=(ValueError, FileNotFoundError, TypeError))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def cache():
    return prefill(helpers.prompts(2, 8), capacity=32, block=4)[0]


@pytest.mark.parametrize("call, words", (
    (lambda cache: fork(cache, 0), "copies=0: must be at least 1"),
    (lambda cache: fork(cache, 1.5), "copies=1.5: must be an int of at least 1"),
    (lambda cache: lib.ingest(FULL, helpers.PLAIN, {}, cache, [[1], [2**40]]), "tokens hold id 1099511627776: ids lie in 0..63"),
    (lambda cache: lib.ingest(FULL, helpers.PLAIN, {}, cache, [[1.5], [1]]), "tokens=[[1.5], [1]]: must be rows of ids"),
    (lambda cache: lib.ingest(FULL, helpers.PLAIN, {}, cache, ["a", "b"]), "must be rows of ids, which are ints"),
    (lambda cache: lib.ingest(FULL, helpers.PLAIN, {}, cache, [b"a", b"b"]), "tokens=[b'a', b'b']: must be rows of ids, which are ints"),
    (lambda cache: lib.ingest(FULL, helpers.PLAIN, {}, cache, [[True], [1]]), "tokens=[[True], [1]]: must be rows of ids, which are ints"),
    (lambda cache: lib.extend("full", helpers.PLAIN, {}, cache, [[1.0], [2.0]]), "expected integers [rows, tokens], got float64(2, 1)"),
    (lambda cache: generate([[1], [2]], cache=cache, dtype="nonsense"), "dtype='nonsense': must be a floating dtype"),
    (lambda cache: lib.extend("full", helpers.PLAIN, {}, cache, [[1], [2]], [1]), "counts: expected integers, one for each of the 2"),
    (lambda cache: lib.decode_step("full", helpers.PLAIN, {}, cache, 5), "token: expected one for each row"),
    (lambda cache: lib.refresh("kivi", cache), "this cache was made by Full()"),
    (lambda cache: take_rows(cache, []), "rows=[]: must name at least one of the rows 0..1"),
    (lambda cache: take_rows(cache, [2]), "rows=[2]: must name at least one of the rows 0..1"),
    (lambda cache: with_token_layout(cache, "piles"), "token layout 'piles': allowed are rows, lanes"),
    (lambda cache: generate([[1], [2]], cache=cache, capacity=64), "capacity=64: the conversation goes on in its cache"),
    (lambda cache: generate([[1]], cache=cache), "prompts has 1 rows: the conversation that they continue has 2"),
    (lambda cache: generate([[1], [2] * 60], cache=cache), "row 1 would outgrow the cache by 39 tokens: give `generate`"),
    (lambda cache: lib.refresh(methods.KIVI(), cache), "this cache was made by Full()"),
    (lambda cache: lib.extend(FULL, helpers.QWEN, {}, cache, jnp.zeros((2, 1), jnp.int32)), "made for another model"),
    (lambda cache: lib.extend(FULL, helpers.PLAIN, {}, cache, jnp.zeros((2, 5), jnp.int32)), "at most 4 tokens between"),
    (lambda cache: lib.extend(FULL, helpers.PLAIN, {}, cache, jnp.zeros(2, jnp.int32)), "expected integers [rows, tokens]"),
    (lambda cache: lib.decode_step(FULL, helpers.PLAIN, {}, cache, jnp.zeros((2, 1), jnp.int32)), "token: expected one for each row"),
), ids=range(23))
def test_arguments_beside_a_cache(call, words, cache):
    refused(lambda: call(cache), words, errors=(ValueError, TypeError))


def test_ids_beyond_32_bits_answer_nan(cache):
    tokens = np.array([[2**32 + 5], [5]])
    _, logits = lib.extend(FULL, helpers.PLAIN, helpers.model().params, fork(cache), tokens)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_a_generation_is_no_cache():
    out = generate()
    for call in (fork, lib.cache_bytes, lib.held_tokens, lib.layer_bytes, lambda x: lib.refresh(FULL, x),
                 lambda x: lib.insert_rows(out.cache, x), lambda x: take_rows(x, [0]),
                 lambda x: lib.extend(FULL, helpers.PLAIN, {}, x, [[1]]), lambda x: lib.ingest(FULL, helpers.PLAIN, {}, x, [[1]])):
        refused(lambda call=call: call(out), "is a Generation: must be a cache, such as `.cache` of a Generation")
