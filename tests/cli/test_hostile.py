"""Bad inputs by the table: what is given, and words that the refusal holds."""

import json
import math
import shutil
import struct
import types
import zipfile

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lowrank_kv_jax import methods
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.calibration.corpus import Corpus
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.results.resume import KEY, finished
from lowrank_kv_jax.files import read_json_object
from lowrank_kv_jax.generation.forward import prefill
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.gguf_file import read_gguf
from lowrank_kv_jax.models.hf_checkpoint import open_hf_directory, read_safetensors_header
from lowrank_kv_jax.models.stored import StoredTensor
from lowrank_kv_jax.saving.checkpoint import METADATA, _seal
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases
from lowrank_kv_jax.saving.saved_cache import load_cache, save_cache

INF, NAN = math.inf, math.nan
DEEP = "[" * 100_000
MODEL = types.SimpleNamespace(name="tiny", config=helpers.PLAIN, fingerprint="f" * 64)


# ---- the command line ---------------------------------------------------------------------------------------------

COMMANDS = (  # arguments, where {d} is a directory with the files of `place`, and words
    ("", "required: COMMAND"),
    ("nothing", "invalid choice: 'nothing'"),
    ("compare --nothing", "unrecognized arguments: --nothing"),
    ("compare --samples x", "--samples: invalid int value: 'x'"),
    ("compare --samples 1000000000", "--samples 1000000000: must be at most 1000000"),
    ("compare --lengths 1000000000000", "--lengths 1000000000000: must be at most 268435456"),
    ("compare --rounds 0", "rounds=0: must be at least 1"),
    ("compare --seed 99999999999", "--seed 99999999999: must be at most 4294967295"),
    ("compare --json /dev/full", "/dev/full: is a character device"),
    ("compare --json {d}", "is a directory; give a regular file"),
    ("compare --json {d}/pipe", "pipe: is a pipe"),
    ("compare --json {d}/none/x.jsonl", "No such file"),
    ("compare --plot {d}/folder.png", "folder.png: is a directory"),
    ("compare --plot {d}/x.exe", "no figure has the suffix '.exe'"),
    ("compare --methods ojakv:steps=1000000000", "steps=1000000000: must be at most 1000"),
    ("compare --methods streamingkv:iterations=1000000000", "iterations=1000000000: must be at most 1000"),
    ("compare --methods ojakv:sinks=1000000000000", "sinks=1000000000000: must be at most"),
    ("bench decode --steps 1000000000", "--steps 1000000000: must be at most 1000000"),
    ("bench decode --rounds -1", "--rounds -1: must be at least 1"),
    ("bench kernels --batch 100000000000", "--batch 100000000000: must be at most"),
    ("eval ruler --tasks nothing", "nothing"),
    ("eval ruler --json /dev/null", "/dev/null: is a character device"),
    ("eval perplexity --text {d}/empty.txt", "holds no text"),
    ("eval perplexity --text {d}/latin.txt", "is not UTF-8 text"),
    ("eval perplexity --text /dev/zero", "/dev/zero: is a character device"),
    ("eval perplexity --text {d}/none.txt", "no such file"),
    ("eval leaderboard --json /dev/full", "/dev/full: is a character device"),
    ("eval leaderboard --json {d}/x.jsonl --markdown /dev/full", "/dev/full: is a character device"),
    ("falsify --rank nan", "--rank nan: must be a finite number"),
    ("streaming --ranks inf", "--ranks inf: must be a finite number"),
    ("calibrate --method full --out {d}/x", "takes nothing from calibration"),
    ("calibrate --method ojakv --out {d}", "choose another place"),
    ("calibrate --method ojakv --out {d}/empty.txt", "is not a directory"),
    ("calibrate --method ojakv --out {d}/x --windows 9999999", "--windows 9999999: must be at most"),
    ("calibrate --method ojakv --out {d}/x --corpus {d}/empty.txt", "holds no text"),
    ("generate --prompt x --model {d}/none", "no such file or directory"),
    ("generate --prompt x --model {d}/empty.txt", "a model is a directory or a .gguf file"),
    ("generate --prompt x --model {d}/empty.gguf", "truncated or not a GGUF file"),
    ("generate --prompt x --model {d}/hf", "config.json: a JSON object is expected, got a list"),
    ("generate --prompt x --temperature nan", "--temperature nan: must be a finite number"),
    ("generate --prompt x --top-k 0", "top_k=0"),
    ("generate --prompt x --top-p 2", "top_p=2.0"),
    ("generate --prompt x --max-new-tokens 1000000000000", "--max-new-tokens 1000000000000: must be at most"),
    ("generate --prompt-file /dev/zero", "/dev/zero: is a character device"),
    ("generate --prompt-file {d}", "Is a directory"),
    ("generate --prompt-file {d}/latin.txt", "is not UTF-8 text"),
    ("inspect --prompt x --out {d}/x.exe", "--out {d}/x.exe: no figure has the suffix '.exe'"),
    ("inspect --prompt x --json /dev/full --out {d}/x.png", "/dev/full: is a character device"),
    ("inspect --prompt x --method nothing", "unknown method 'nothing'"),
    ("inspect --prompt x --out {d}/none/x.png", "No such file"),
    ("inspect --prompt-file {d}/empty.txt --out {d}/x.png", "the prompt is empty"),
    ("inspect --method full", "--prompt --prompt-file is required"),
    ("report /dev/zero", "/dev/zero: is a character device"),
    ("report {d}/none.jsonl", "No such file"),
    ("report {d}", "Is a directory"),
    ("report {d}/empty.txt", "no record with a score or a likelihood"),
    ("report {d}/deep.json", "no record with a score or a likelihood"),
    ("methods nothing", "unknown method 'nothing'"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    import os

    path = tmp_path_factory.mktemp("place")
    (path / "empty.txt").touch()
    (path / "empty.gguf").touch()
    (path / "latin.txt").write_bytes(b"caf\xe9")
    (path / "deep.json").write_text(DEEP)
    (path / "folder.png").mkdir()
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text("[]")
    os.mkfifo(path / "pipe")
    return path


@pytest.mark.parametrize("line, words", COMMANDS, ids=lambda text: text or "nothing")
def test_commands(line, words, place, capsys, monkeypatch):
    if "--model" not in line:
        monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    before = sorted(path.name for path in place.iterdir())
    assert main(line.format(d=place).split()) == 2
    shown = capsys.readouterr()
    told = [text for text in shown.err.splitlines() if not text.startswith("lowrank-kv: warning: ")]
    assert shown.out == "" and len(told) == 1 and told[0].startswith("lowrank-kv: error: ")
    assert words.format(d=place) in told[0]
    assert sorted(path.name for path in place.iterdir()) == before


# ---- methods ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, words", (
    ("ojakv:sinks=1000000000000", "sinks=1000000000000: must be at most 268435456"),
    ("ojakv:recent=-1", "recent=-1"),
    ("ojakv:steps=1000000000", "steps=1000000000: must be at most 1000"),
    ("ojakv:eta_pre=inf", "eta_pre=inf: must be a finite number"),
    ("ojakv:eta_pre=nan", "eta_pre=nan: must be a finite number"),
    ("ojakv:rank=nan", "rank=nan"),
    ("snapkv:budget=1000000000000", "budget=1000000000000: must be at most"),
    ("snapkv:keep=inf", "keep=inf"),
    ("h2o:budget_bytes=99999999999999999999", "budget_bytes=99999999999999999999: must be at most"),
    ("sliding-window:budget=1000000000000", "budget=1000000000000: must be at most"),
    ("streamingllm:sinks=1000000000000", "sinks=1000000000000: must be at most"),
    ("streamingkv:iterations=1000000000", "iterations=1000000000: must be at most 1000"),
    ("kivi:bits=3", "bits=3"),
    ("osp:chunk_length=1000000000000", "chunk_length=1000000000000: must be at most"),
    ("full:x=1", "full has no field 'x'"),
    ("full+full", "both a codec"),
))
def test_methods(spec, words):
    with pytest.raises(ValueError) as refused:
        parse_method(spec)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", sorted(methods.REGISTRY))
def test_no_method_takes_a_number_that_overflows(name):
    import dataclasses

    cls = methods.REGISTRY[name]
    for field in dataclasses.fields(cls):
        for value in (10**30, INF, NAN):
            with pytest.raises((ValueError, TypeError)) as refused:
                cls(**{field.name: value})
            assert len(str(refused.value)) < 500


# ---- config.json --------------------------------------------------------------------------------------------------

_LINEAR = {"rope_type": "linear", "factor": 4.0}
_LLAMA3 = CONFIGS["llama3.1"]["rope_scaling"]

CONFIG_FIELDS = (  # family, what is changed, words
    ("llama2", {"vocab_size": -1}, "vocab_size=-1 is not an integer in 1..2147483647"),
    ("llama2", {"vocab_size": 2.5}, "vocab_size=2.5 is not an integer"),
    ("llama2", {"vocab_size": True}, "vocab_size=True is not an integer"),
    ("llama2", {"vocab_size": "96"}, "vocab_size='96' is not an integer"),
    ("llama2", {"hidden_size": []}, "hidden_size=[] is not an integer"),
    ("llama2", {"hidden_size": None}, "hidden_size is missing"),
    ("llama2", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 is not an integer in 1..4096"),
    ("llama2", {"num_attention_heads": 0}, "num_attention_heads=0 is not an integer in 1..65536"),
    ("llama2", {"num_key_value_heads": 3}, "q_heads must be a multiple of kv_heads"),
    ("llama2", {"num_key_value_heads": [2]}, "num_key_value_heads=[2] is not an integer"),
    ("llama2", {"head_dim": 7}, "rotary_dim must be a positive even number, got 7"),
    ("llama2", {"head_dim": -16}, "head_dim=-16 is not an integer"),
    ("llama2", {"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648 is not an integer"),
    ("llama2", {"rms_norm_eps": -1}, "rms_norm_eps=-1 is not a finite number in 0..1"),
    ("llama2", {"rms_norm_eps": NAN}, "rms_norm_eps=nan is not a finite number"),
    ("llama2", {"rms_norm_eps": {}}, "rms_norm_eps={} is not a finite number"),
    ("llama2", {"rope_theta": 0}, "rope_theta=0 is not a finite number in 1..inf"),
    ("llama2", {"rope_theta": INF}, "rope_theta=inf is not a finite number"),
    ("llama2", {"rope_theta": 10**400}, "rope_theta=1000"),
    ("llama2", {"rope_scaling": 5}, "rope_scaling=5 is not an object"),
    ("llama2", {"rope_scaling": {"rope_type": 5}}, "rope rope_type=5: must be a string"),
    ("llama2", {"rope_scaling": {"rope_type": "magic"}}, "rope_type 'magic' is not supported"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": INF}}, "rope factor=inf: must be a finite number"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": "4"}}, "rope factor='4': must be a finite number"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": 0.5}}, "rope factor 0.5: must be a finite number of at least 1"),
    ("llama2", {"rope_scaling": _LINEAR | {"factor": 1e300}}, "context must be at most 2147483647"),
    ("llama2", {"rope_scaling": {"rope_type": "linear"}}, "missing ['factor']"),
    ("llama2", {"rope_parameters": {"rope_theta": 0.5}}, "rope theta 0.5: must be a finite number above 1"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"high_freq_factor": 1.0}}, "the first above 0 and below the second"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"low_freq_factor": -1}}, "low_freq_factor -1.0"),
    ("llama3.1", {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 0}}, "original_context 0"),
    ("llama2", {"attention_bias": "yes"}, "attention_bias='yes' is not true or false"),
    ("llama2", {"eos_token_id": "end"}, "eos_token_id='end' is not an integer"),
    ("llama2", {"eos_token_id": [2, None]}, "eos_token_id=[2, None] is not an integer"),
    ("llama2", {"bos_token_id": -1}, "bos_token_id=-1 is not an integer"),
    ("llama2", {"model_type": ["llama"]}, "config.json"),
    ("llama2", {"model_type": None}, "model_type None is not supported"),
    ("mistral", {"sliding_window": -5}, "sliding_window=-5 is not an integer"),
    ("qwen2_window", {"layer_types": 3}, "layer_types=3 is not a list of strings"),
    ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types has 1 entries: must be 3"),
    ("qwen2_window", {"max_window_layers": "all"}, "max_window_layers='all' is not an integer"),
)


@pytest.mark.parametrize("family, change, words", CONFIG_FIELDS, ids=lambda value: str(value)[:60])
def test_fields_of_a_config(family, change, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family] | change))
    with pytest.raises(ValueError) as refused:
        open_hf_directory(tmp_path)
    assert "config.json: " in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize("text, words", (
    ("", "not valid JSON"), ("[]", "a JSON object is expected, got a list"), ("5", "got a int"), ("null", "got a NoneType"),
    (DEEP, "nested too deeply"), ("{" + '"a":{' * 100_000, "nested too deeply"), ('{"a": 1', "not valid JSON"),
    ("\ufeff{}", "not valid JSON"), ("9" * 5000, "not valid JSON"), (b"\xff\xfe{}", "not valid JSON"),
), ids=lambda value: str(value)[:12])
def test_a_file_that_is_no_json_object(text, words, tmp_path):
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as refused:
        read_json_object(tmp_path / "x.json")
    assert "x.json: " in str(refused.value) and words in str(refused.value)


@pytest.mark.parametrize("fields, words", (
    ({"theta": 0.0}, "theta 0.0"), ({"theta": 1.0}, "theta 1.0"), ({"theta": NAN}, "theta nan"),
    ({"factor": INF}, "factor inf"), ({"factor": 0.0}, "factor 0.0"),
    ({"scaling": "llama3", "low_freq_factor": 4.0}, "low_freq_factor 4.0, high_freq_factor 4.0"),
    ({"scaling": "yarn", "beta_slow": 32.0}, "beta_slow 32.0, beta_fast 32.0"),
    ({"scaling": "yarn", "original_context": 0}, "original_context 0"), ({"scaling": "other"}, "is not one of"),
))
def test_rope(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeSpec(**{"theta": 10000.0, "rotary_dim": 8} | fields)


# ---- safetensors --------------------------------------------------------------------------------------------------


def _tensor(offsets=(0, 16), shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _safetensors(header, data=bytes(32)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("content", (
    b"", b"1234567", _safetensors(b"5"), _safetensors(b"[]"), _safetensors(b"{"), _safetensors(DEEP.encode()),
    _safetensors({"a": 5}), _safetensors({"a": {}}), _safetensors({"a": _tensor((-16, 0))}),
    _safetensors({"a": _tensor((16, 0))}), _safetensors({"a": _tensor((0, 10**18), (10**18 // 4,))}),
    _safetensors({"a": _tensor(), "b": _tensor((8, 24))}), _safetensors({"a": _tensor((8, 24))}),
    _safetensors({"a": _tensor(shape=(5,))}), _safetensors({"a": _tensor(shape=(-4,))}),
    _safetensors({"a": _tensor()}, bytes(8)), _safetensors({"a": _tensor()}, bytes(64)),
    _safetensors({"a": _tensor(dtype="X1")}), _safetensors({"a": _tensor(dtype="I32")}, bytes(16)),
    (2**63).to_bytes(8, "little") + b"{}", b"PK\x05\x06" + bytes(18),
), ids=range(21))
def test_safetensors(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors: "):
        read_safetensors_header(path)


@pytest.mark.parametrize("weight_map", (5, [], {"a": 5}, {"a": "../a"}, {"a": "/etc/passwd"}, {"a": ""}, None))
def test_an_index_names_files_beside_it(weight_map, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="weight_map"):
        open_hf_directory(tmp_path)


# ---- GGUF ---------------------------------------------------------------------------------------------------------


def _text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def _gguf(keys=(), tensors=(), data=bytes(96), version=3):
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys)
    for name, shape, kind, offset in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return head + bytes(-len(head) % 32) + data


def _key(name, kind, value):
    return _text(name) + struct.pack("<I", kind) + value


_NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000)) + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize("content, words", (
    (_gguf(version=1), "GGUF version 1 is not read"),
    (_gguf([_key("a", 99, b"")]), "value type 99"),
    (_gguf([_key("a", 9, _NESTED)]), "nested too deeply"),
    (_gguf([_key("a", 9, struct.pack("<IQ", 4, 2**60))]), "bytes wanted"),
    (_gguf([_key("a", 8, struct.pack("<Q", 2**63))]), "bytes wanted"),
    (_gguf([_key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "is not UTF-8"),
    (_gguf(2 * [_key("a", 4, bytes(4))]), "the key 'a' stands there twice"),
    (_gguf([_key("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0"),
    (_gguf([_key("general.alignment", 4, struct.pack("<I", 33))]), "must be a power of two"),
    (_gguf([_key("general.alignment", 7, b"\1")]), "general.alignment is True"),
    (_gguf(tensors=2 * [("t", (4,), 0, 0)]), "the tensor 't' stands there twice"),
    (_gguf(tensors=[("t", (4,), 0, 2**64 - 32)]), "truncated GGUF"),
    (_gguf(tensors=[("t", (4,), 0, 7)]), "the offset of 't' is 7"),
    (_gguf(tensors=[("t", (16,), 0, 0), ("u", (4,), 0, 32)]), "'t' and 'u' overlap"),
    (_gguf(tensors=[("t", (2**60, 2**60), 0, 0)]), "truncated GGUF"),
    (_gguf(tensors=[("t", (0,), 0, 0)]), "has shape"),
    (_gguf(tensors=[("t", (), 0, 0)]), "has 0 dimensions"),
    (_gguf(tensors=[("t", (1,) * 5, 0, 0)]), "has 5 dimensions"),
    (_gguf(tensors=[("t", (4,), 77, 0)]), "unsupported type: t (77)"),
    (_gguf(tensors=[("t", (5,), 8, 0)]), "rows are multiples of 32"),
), ids=lambda value: value if isinstance(value, str) else "gguf")
def test_gguf(content, words, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read_gguf(path)
    assert "x.gguf: " in str(refused.value) and words in str(refused.value)


# ---- saved bases and caches ---------------------------------------------------------------------------------------

OJA = methods.OjaKV(rank=4)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    path = tmp_path_factory.mktemp("bases") / "own"
    save_bases(path, helpers.bases_for(OJA), MODEL, OJA, Corpus.of(["text"]))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path, method = tmp_path_factory.mktemp("cache") / "own", methods.Full()
    held, _ = prefill(method, helpers.PLAIN, helpers.model().params, helpers.prompts(1, 8), capacity=16)
    save_cache(path, held, MODEL)
    return path


def changed(saved, to, place, value, seal=True):
    """A copy of a save with one field of its description changed, or left out for `...`."""
    path = shutil.copytree(saved, to / "own")
    content = json.loads((path / METADATA).read_text())
    *outer, last = place
    field = content
    for name in outer:
        field = field[name]
    if value is ...:
        del field[last]
    else:
        field[last] = value
    if seal and last != "sha256":
        content["sha256"] = _seal({name: held for name, held in content.items() if name != "sha256"})
    (path / METADATA).write_text(json.dumps(content))
    return path


SAVED_FIELDS = (
    (("kind",), "cache", "kind='cache': must be 'bases'"), (("kind",), ..., "kind=None: must be 'bases'"),
    (("format",), 99, "format=99: this version reads format"), (("format",), ..., "format=None"),
    (("arrays",), "../elsewhere", "arrays='../elsewhere': must be arrays-"), (("arrays",), 5, "arrays=5: must be a string"),
    (("arrays",), "arrays-" + 16 * "0", "the directory with the arrays is missing"),
    (("files",), [], "files=[]: must be an object"), (("files",), {"../x": "0"}, "is missing"),
    (("sha256",), "0", "is damaged"), (("sha256",), ..., "the field 'sha256' is missing"),
    (("model",), ..., "the field 'model' is missing"), (("fingerprint",), 5, "fingerprint=5: must be a string"),
    (("fingerprint",), "0" * 64, "belong to model 'tiny'"), (("fit",), None, "fit=None: must be an object"),
    (("groups",), ..., "the field 'groups' is missing"), (("groups",), {}, "groups={}: must be a list"),
    (("groups",), [], "groups has 0 entries: must be 3"), (("groups", 0), 5, "groups[0]=5: must be an object or null"),
    (("groups", 0, "k"), 5, "groups[0].k=5: must be an object"), (("groups", 0, "z"), {}, "have no such array"),
    (("groups", 0, "k", "dtype"), "int32", "groups[0].k.dtype='int32': must be one of float16"),
    (("groups", 0, "k", "dtype"), "float16", "0.k"), (("groups", 0, "k", "dtype"), ..., "the field 'dtype' is missing"),
    (("groups", 0, "k", "shape"), "x", "shape='x': must be a list"), (("groups", 0, "k", "shape"), [-1], "shape=[-1]"),
    (("groups", 0, "k", "shape"), [10**30], "shape=[10000000"), (("groups", 0, "k", "shape"), [1, 2], "0.k: (4, 8, 4)"),
)


@pytest.mark.parametrize("field, value, words", SAVED_FIELDS, ids=str)
def test_fields_of_saved_bases(field, value, words, bases, tmp_path):
    path = changed(bases, tmp_path, field, value)
    with pytest.raises(ValueError) as refused:
        load_bases(path, MODEL, OJA)
    assert str(path) in str(refused.value) and words in str(refused.value)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    path, method = tmp_path_factory.mktemp("compressed") / "own", methods.Full()
    held, _ = prefill(method, helpers.PLAIN, helpers.model().params, helpers.prompts(1, 8), capacity=16)
    save_cache(path, held, MODEL, compress=True)
    return path


CACHE_FIELDS = (
    (("layout",), [], "layout=[]: must be an object"), (("layout", "batch"), 0, "batch=0: must lie in 1.."),
    (("layout", "batch"), 10**30, "must lie in 1.."), (("layout", "capacity"), "x", "capacity='x': must be an integer"),
    (("layout", "capacity"), ..., "the field 'capacity' is missing"), (("layout", "capacity"), 17, "does not fit"),
    (("layout", "block"), True, "block=True: must be an integer"), (("layout", "dtype"), "int32", "dtype='int32': must be"),
    (("layout", "tokens"), "piles", "tokens='piles': must be 'rows' or 'lanes'"), (("bases",), 5, "bases=5: must be"),
    (("bases",), "0", "other calibrated bases"), (("method",), None, "method=None: must be a string"),
    (("kind",), "bases", "kind='bases': must be 'cache'"),
)


@pytest.mark.parametrize("field, value, words", CACHE_FIELDS, ids=str)
def test_fields_of_a_saved_cache(field, value, words, cache, tmp_path):
    path = changed(cache, tmp_path, field, value)
    with pytest.raises(ValueError) as refused:
        load_cache(path, methods.Full(), MODEL)
    assert str(path) in str(refused.value) and words in str(refused.value)


K = "groups.0.ends.0.k"
CODED_FIELDS = (
    (("coded",), [], "coded=[]: must be an object"), (("coded",), {}, f"{K}: None, expected 'bfloat16[1, 4, 16, 8]'"),
    (("coded",), ..., f"what was saved does not fit: {K}"),
    (("coded", K), 5, f"{K}: 5, expected 'bfloat16[1, 4, 16, 8]'"), (("coded", "z"), "int32[1]", "z: 'int32[1]', expected None"),
    (("coded", K), "bfloat16[1, 4, 8, 16]", f"{K}: 'bfloat16[1, 4, 8, 16]', expected"), (("layout", "capacity"), 17, K),
    (("layout", "capacity"), 2**31 - 1, K), (("layout", "dtype"), "float32", K),
    (("sha256",), "0", "is damaged"), (("files",), {"../x": "0"}, "is missing"),
)


@pytest.mark.parametrize("field, value, words", CODED_FIELDS, ids=str)
def test_fields_of_a_compressed_cache(field, value, words, compressed, tmp_path):
    test_fields_of_a_saved_cache(field, value, words, compressed, tmp_path)


def test_bytes_of_a_compressed_cache(compressed, tmp_path):
    """Each file changed by itself: named, and in one line."""
    for file in sorted(file.relative_to(compressed) for file in compressed.glob("arrays-*/**/*") if file.is_file()):
        path = shutil.copytree(compressed, tmp_path / "own", dirs_exist_ok=True)
        data = bytearray((path / file).read_bytes())
        data[len(data) // 2] ^= 1
        (path / file).write_bytes(data)
        with pytest.raises(ValueError) as refused:
            load_cache(path, methods.Full(), MODEL)
        assert str(refused.value).startswith(f"{path / file}: is damaged") and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ("", "[]", "{}", "5", DEEP, "\0" * 100))
def test_descriptions_that_are_none(text, bases, tmp_path):
    path = shutil.copytree(bases, tmp_path / "own")
    (path / METADATA).write_text(text)
    with pytest.raises(ValueError, match=METADATA):
        load_bases(path, MODEL, OJA)


def test_arrays_that_are_missing_or_links(bases, tmp_path):
    path = shutil.copytree(bases, tmp_path / "own")
    arrays = next(path.glob("arrays-*"))
    data = next(file for file in arrays.rglob("*") if file.is_file())
    data.unlink()
    with pytest.raises(ValueError, match=f"{data.name}: is missing"):
        load_bases(path, MODEL, OJA)
    data.symlink_to("/dev/zero")  # never read
    with pytest.raises(ValueError, match=f"{data.name}: is missing"):
        load_bases(path, MODEL, OJA)
    arrays.rename(tmp_path / "arrays")
    with pytest.raises(ValueError, match="the directory with the arrays is missing"):
        load_bases(path, MODEL, OJA)
    arrays.symlink_to(tmp_path / "arrays")
    with pytest.raises(ValueError, match="the directory with the arrays is missing"):
        load_bases(path, MODEL, OJA)


def test_bases_of_integers_are_not_saved(tmp_path):
    whole = jax.tree.map(lambda u: u.astype(jnp.int32), helpers.bases_for(OJA))
    with pytest.raises(ValueError, match="0.k is int32: must be one of float16, bfloat16"):
        save_bases(tmp_path / "own", whole, MODEL, OJA)
    assert not list(tmp_path.iterdir())


# ---- unfinished calibrations --------------------------------------------------------------------------------------


def _fake_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("key.npy", b"no array")


def _pickles(path):
    np.savez(path, key=np.array([{}], object), done=np.array(1), allow_pickle=True)


def _without(path):
    np.savez(path, done=np.array(1))


def _integers(path):
    np.savez(path, key=np.array("{}"), done=np.array(1), k=np.arange(3))


def _nan(path):
    np.savez(path, key=np.array("{}"), done=np.array(1), k=np.full(3, NAN))


def _negative(path):
    np.savez(path, key=np.array("{}"), done=np.array(-1))


def _bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("k.npy", bytes(10**7))


def _empty_zip(path):
    zipfile.ZipFile(path, "w").close()


@pytest.mark.parametrize("write", (
    lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"PK\x03\x04" + bytes(50)), lambda path: path.mkdir(),
    _empty_zip, _fake_zip, _pickles, _without, _integers, _nan, _negative, _bomb,
))
def test_sums(write, tmp_path):
    write(tmp_path / "sums.npz")
    with pytest.raises(ValueError, match="sums.npz: "):
        CheckpointedSums(tmp_path / "sums.npz", {}).load()


# ---- records ------------------------------------------------------------------------------------------------------

_SCORED = {"command": "c", "model": "m", "method": "full", "task": "t", "length": 8, "index": 0, "score": 1.0}
_NLL = {"command": "c", "model": "m", "method": "full", "task": "t", "length": 8, "index": 0, "nll": 1.0,
        "scored_tokens": 4, "text": {"name": "x"}}


@pytest.mark.parametrize("base, change", (
    (_SCORED, {"score": "x"}), (_SCORED, {"score": [1]}), (_SCORED, {"index": {}}), (_SCORED, {"length": [8]}),
    (_SCORED, {"command": 5}), (_SCORED, {"model": {}}), (_SCORED, {"cache_bytes": "x"}), (_SCORED, {"method": 5}),
    (_NLL, {"nll": "x"}), (_NLL, {"text": 5}), (_NLL, {"scored_tokens": -1}), (_NLL, {"step": []}), (_NLL, {"seed": {}}),
), ids=str)
def test_a_report_leaves_records_out_that_it_cannot_count(base, change, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(json.dumps(base | change) + "\n")
    assert main(["report", str(tmp_path / "x.jsonl")]) == 2
    assert "no record with a score or a likelihood" in capsys.readouterr().err


@pytest.mark.parametrize("change", (
    {}, {"cache_bytes": 8}, {"cache_bytes": 8, "full_cache_bytes": 16}, {"full_cache_bytes": 16, "bytes_per_token": 1},
))
def test_a_report_takes_perplexities_without_bytes(change, tmp_path, capsys):
    other = {"method": "ojakv"} | change
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(_NLL | extra) + "\n" for extra in ({}, other)) + '{"cut')
    assert main(["report", str(tmp_path / "x.jsonl")]) == 0
    assert "ojakv" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", (
    ({"score": None}, "has neither a score nor a likelihood"), ({"score": "x"}, "score='x': must be a number"),
    ({"cache_bytes": []}, "cache_bytes=[]: must be a number"), ({"style": "chat"}, "style was 'chat' and is now 'base'"),
))
def test_a_run_is_not_resumed_from_damage(change, words, tmp_path):
    record = dict.fromkeys(KEY) | {"method": "full", "task": "t", "index": 0, "score": 1.0, "style": "base"} | change
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record | {"index": [0]}) + "\n")
    key = tuple(record[field] for field in KEY)
    with pytest.raises(ValueError) as refused:
        finished(tmp_path / "x.jsonl", {key: {"style": "base"}})
    assert "x.jsonl" in str(refused.value) and words in str(refused.value)


# ---- fuzz: what is read from damaged bytes equals what was written, or is refused by a ValueError ------------------

MUTATIONS = st.lists(
    st.tuples(st.sampled_from(("set", "cut", "insert", "repeat")), st.floats(0, 1), st.binary(min_size=1, max_size=8)),
    min_size=1, max_size=3,
)


def mutate(data, mutations):
    data = bytearray(data)
    for kind, where, new in mutations:
        at = int(where * len(data))
        if kind == "set":
            data[at : at + len(new)] = new
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = new
        else:
            data[at:at] = data[at : at + 64]
    return bytes(data)


def same(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def reads_alike_or_refuses(path, read, whole, mutations, alike=same):
    """Damage one file, read, and put it back."""
    data, before = path.read_bytes(), whole()
    path.write_bytes(mutate(data, mutations))
    try:
        found = read()
    except ValueError:
        return
    else:
        assert alike(found, before)
    finally:
        path.write_bytes(data)


@settings(max_examples=25)
@given(which=st.integers(0, 100), mutations=MUTATIONS)
def test_fuzz_saved_bases(which, mutations, bases):
    files = sorted(path for path in bases.rglob("*") if path.is_file())
    known = helpers.bases_for(OJA)
    read = lambda: load_bases(bases, MODEL, OJA)  # noqa: E731
    reads_alike_or_refuses(files[which % len(files)], read, lambda: known, mutations)


@settings(max_examples=15)
@given(mutations=MUTATIONS)
def test_fuzz_description_of_a_saved_cache(mutations, cache):
    read = lambda: load_cache(cache, methods.Full(), MODEL)  # noqa: E731
    reads_alike_or_refuses(cache / METADATA, read, read, mutations)


@settings(max_examples=15)
@given(which=st.integers(0, 100), mutations=MUTATIONS)
def test_fuzz_compressed_cache(which, mutations, compressed):
    files = sorted(path for path in compressed.rglob("*") if path.is_file())
    read = lambda: load_cache(compressed, methods.Full(), MODEL)  # noqa: E731
    reads_alike_or_refuses(files[which % len(files)], read, read, mutations)


@settings(max_examples=60)
@given(mutations=MUTATIONS)
def test_fuzz_sums(mutations, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "sums.npz"
    sums = CheckpointedSums(path, {"of": "x"})
    sums.add("k", np.arange(6.0).reshape(2, 3))
    sums.save(3)

    def read():
        held = CheckpointedSums(path, {"of": "x"})
        return held.load(), held.arrays

    reads_alike_or_refuses(path, read, read, mutations)


def lie_within(found, size):
    assert all(isinstance(t, StoredTensor) and 0 <= t.offset <= t.offset + t.nbytes <= size for t in found.values())
    for tensor in found.values():
        for _ in tensor.slabs() if tensor.shape and tensor.nbytes < 10**6 else ():
            pass


@settings(max_examples=60)
@given(mutations=MUTATIONS)
def test_fuzz_safetensors(mutations, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": np.arange(4.0), "b": np.ones((2, 3), np.float32)}, path)
    path.write_bytes(mutate(path.read_bytes(), mutations))
    try:
        found = read_safetensors_header(path)
    except ValueError:
        return
    lie_within(found, path.stat().st_size)


@settings(max_examples=100)
@given(mutations=MUTATIONS)
def test_fuzz_gguf(mutations, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.gguf"
    keys = [_key("general.architecture", 8, _text("llama")), _key("a", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3))]
    path.write_bytes(mutate(_gguf(keys, [("t", (8,), 0, 0), ("u", (4, 2), 0, 32)]), mutations))
    try:
        found = read_gguf(path).tensors
    except ValueError:
        return
    lie_within(found, path.stat().st_size)


@settings(max_examples=100)
@given(family=st.sampled_from(sorted(CONFIGS)), mutations=MUTATIONS)
def test_fuzz_config(family, mutations, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    (path / "config.json").write_bytes(mutate(json.dumps(CONFIGS[family]).encode(), mutations))
    with pytest.raises((ValueError, FileNotFoundError)):  # what is still a config has no weights
        open_hf_directory(path)


@settings(max_examples=60)
@given(mutations=MUTATIONS)
def test_fuzz_records(mutations, tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    whole = "".join(json.dumps(_SCORED | {"index": i}) + "\n" for i in range(4)).encode()
    path.write_bytes(mutate(whole, mutations))
    try:
        assert all(isinstance(record, dict) for record in read_records(path))
    except ValueError:
        assert b"\n" in whole
    assert main(["report", str(path)]) in (0, 2)
