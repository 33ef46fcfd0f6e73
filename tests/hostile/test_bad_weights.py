"""Safetensors and GGUF files by the table: their content, and words of the refusal."""

import json
import struct

import pytest
from gguf_files import ARRAY, FLAG, FLOAT, INT, STRING, field, gguf, tiny_fields, tiny_tensors
from goldens.tiny_models import CONFIGS, DEEPSEEK
from refusing import refused

from lowrank_kv_jax.models.gguf_file import read_gguf
from lowrank_kv_jax.models.hf_checkpoint import open_hf_directory, read_safetensors_header
from lowrank_kv_jax.models.load import load_model

# ---- safetensors --------------------------------------------------------------------------------------------------


def tensor(offsets=(0, 16), shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def safetensors(header, data=bytes(32)):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


DAMAGED = "truncated, damaged or not a safetensors file"
SAFETENSORS = (
    ("empty", b"", DAMAGED), ("7 bytes", b"1234567", DAMAGED), ("header 5", safetensors(b"5"), DAMAGED),
    ("header []", safetensors(b"[]"), DAMAGED), ("half a header", safetensors(b"{"), DAMAGED),
    ("deep", safetensors(b"[" * 100_000), DAMAGED), ("NaN", safetensors(b'{"a": NaN}'), DAMAGED),
    ("entry 5", safetensors({"a": 5}), DAMAGED), ("no fields", safetensors({"a": {}}), DAMAGED),
    ("negative", safetensors({"a": tensor((-16, 0))}), DAMAGED), ("backwards", safetensors({"a": tensor((16, 0))}), DAMAGED),
    ("huge", safetensors({"a": tensor((0, 10**18), (10**18 // 4,))}), DAMAGED),
    ("overlap", safetensors({"a": tensor(), "b": tensor((8, 24))}), DAMAGED), ("gap", safetensors({"a": tensor((8, 24))}), DAMAGED),
    ("too many", safetensors({"a": tensor(shape=(5,))}), DAMAGED), ("minus 4", safetensors({"a": tensor(shape=(-4,))}), DAMAGED),
    ("cut off", safetensors({"a": tensor()}, bytes(8)), DAMAGED), ("more behind", safetensors({"a": tensor()}, bytes(64)), DAMAGED),
    ("type X1", safetensors({"a": tensor(dtype="X1")}), DAMAGED),
    ("type I32", safetensors({"a": tensor(dtype="I32")}, bytes(16)), "a has element type 'I32'; it must be one of"),
    ("long header", (2**63).to_bytes(8, "little") + b"{}", DAMAGED), ("a zip", b"PK\x05\x06" + bytes(18), DAMAGED),
)


@pytest.mark.parametrize("content, words", [row[1:] for row in SAFETENSORS], ids=[row[0] for row in SAFETENSORS])
def test_safetensors(content, words, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(lambda: read_safetensors_header(path), "model.safetensors: ", words)


@pytest.mark.parametrize("weight_map", (
    5, [], {"a": 5}, {"a": "../a"}, {"a": "/etc/passwd"}, {"a": ""}, {"a": "."}, {"a": "x\0"}, {"a": "x" * 300}, {"a": None}, None,
), ids=lambda value: str(value)[:20])
def test_an_index_names_files_beside_it(weight_map, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: open_hf_directory(tmp_path), "model.safetensors.index.json: weight_map=", "must be an object that names files")


def test_a_config_that_asks_for_more_tensors_than_can_be_listed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK["deepseek_v2_lite"] | {"n_routed_experts": 65536}))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": tensor()}, bytes(16)))
    refused(lambda: load_model(tmp_path), f"{tmp_path}: its config asks for 393", "tensors, and there are 1")


# ---- GGUF ---------------------------------------------------------------------------------------------------------

NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(100_000)) + struct.pack("<IQ", INT, 0)
GGUF = (
    (b"", "truncated or not a GGUF file (0 bytes)"),
    (b"GGML" + bytes(60), "not a GGUF file, it starts with b'GGML'"),
    (gguf(version=1), "GGUF version 1 is not read, only 2 and 3 in little-endian order"),
    (gguf(version=3 << 24), "GGUF version 50331648 is not read"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "bytes wanted"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "bytes wanted"),
    (gguf([field("a", 99, b"")]), "value type 99"),
    (gguf([field("a", ARRAY, NESTED)]), "arrays nested too deeply"),
    (gguf([field("a", ARRAY, struct.pack("<IQ", INT, 2**60))]), "bytes wanted"),
    (gguf([field("a", ARRAY, struct.pack("<IQ", STRING, 2**60))]), "bytes wanted"),
    (gguf([field("a", STRING, struct.pack("<Q", 2**63))]), "bytes wanted"),
    (gguf([field("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]), "is not UTF-8"),
    (gguf(2 * [field("a", INT, 0)]), "the key 'a' stands there twice"),
    (gguf([field("general.alignment", INT, 0)]), "general.alignment is 0; it must be a power of two"),
    (gguf([field("general.alignment", INT, 33)]), "general.alignment is 33; it must be a power of two"),
    (gguf([field("general.alignment", FLAG, True)]), "general.alignment is True"),
    (gguf(tensors=2 * [("t", (4,), 0, 0)]), "the tensor 't' stands there twice"),
    (gguf(tensors=[("t", (4,), 0, 2**64 - 32)]), "truncated GGUF"),
    (gguf(tensors=[("t", (4,), 0, 7)]), "the offset of 't' is 7; it must be a multiple of 32"),
    (gguf(tensors=[("t", (16,), 0, 0), ("u", (4,), 0, 32)]), "'t' and 'u' overlap"),
    (gguf(tensors=[("t", (2**60, 2**60), 0, 0)]), "truncated GGUF"),
    (gguf(tensors=[("t", (0,), 0, 0)]), "has shape (0,), rows are multiples of 1"),
    (gguf(tensors=[("t", (), 0, 0)]), "'t' has 0 dimensions; allowed are 1 to 4"),
    (gguf(tensors=[("t", (1,) * 5, 0, 0)]), "'t' has 5 dimensions; allowed are 1 to 4"),
    (gguf(tensors=[("t", (4,), 77, 0)]), "unsupported type: t (77); read are"),
    (gguf(tensors=[("t", (5,), 8, 0)]), "rows are multiples of 32"),
)


@pytest.mark.parametrize("content, words", GGUF, ids=[words for _, words in GGUF])
def test_gguf(content, words, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused(lambda: read_gguf(path), "x.gguf: ", words)


FIELDS = (  # of a whole model: a key, its kind and value, and words
    ("general.architecture", STRING, "mamba", "architecture 'mamba' is not supported; it must be one of"),
    ("general.architecture", INT, 5, "architecture 5 is not supported"),
    ("general.architecture", ARRAY, (INT, [1]), "architecture [1] is not supported"),
    ("llama.block_count", INT, 10**9, "block_count is 1000000000, but there are 12 tensors"),
    ("llama.block_count", INT, 0, "block_count is 0"),
    ("llama.block_count", STRING, "1", "llama.block_count='1': must be a number"),
    ("llama.block_count", ARRAY, (INT, [1]), "values that differ by layer are not supported: ['block_count']"),
    ("llama.context_length", INT, 0, "max_position_embeddings=0 is not an integer in 1..2147483647"),
    ("llama.context_length", INT, 2**32 - 1, "max_position_embeddings=4294967295 is not an integer"),
    ("llama.context_length", FLOAT, 128.0, "max_position_embeddings=128.0 is not an integer"),
    ("llama.embedding_length", INT, 47, "rotary_dim must be a positive even number"),
    ("llama.attention.head_count", INT, 0, "num_attention_heads=0 is not an integer in 1..65536"),
    ("llama.attention.head_count_kv", INT, 3, "q_heads must be a multiple of kv_heads, got 4 and 3"),
    ("llama.attention.layer_norm_rms_epsilon", FLOAT, float("nan"), "rms_norm_eps=nan is not a finite number in 0..1"),
    ("llama.attention.layer_norm_rms_epsilon", STRING, "x", "rms_epsilon='x': must be a number"),
    ("llama.rope.freq_base", FLOAT, float("inf"), "rope_theta=inf is not a finite number"),
    ("llama.rope.freq_base", FLOAT, 0.0, "rope_theta=0.0 is not a finite number in 1..inf"),
    ("llama.rope.dimension_count", INT, 6, "rope.dimension_count is 6, it must equal the head_dim of 12"),
    ("llama.rope.scaling.type", STRING, "magic", "rope.scaling.type 'magic' is not supported, only 'none' and 'linear'"),
    ("llama.rope.scaling.factor", FLOAT, float("inf"), "rope factor=inf: must be a finite number"),
    ("llama.vocab_size", INT, 95, "misshapen"),
    ("llama.expert_count", INT, 8, "unknown metadata: llama.expert_count=8"),
    ("tokenizer.ggml.model", STRING, "bert", "tokenizer.ggml.model 'bert' is not supported; it must be 'gpt2' or 'llama'"),
    ("tokenizer.ggml.tokens", ARRAY, (INT, [1, 2]), "tokenizer.ggml.tokens=[1, 2]: must be a list of strings"),
    ("tokenizer.ggml.tokens", STRING, "abc", "tokenizer.ggml.tokens='abc': must be a list of strings"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b" * 10**6]), "must be one of each of the 2 tokens, has 96"),
    ("tokenizer.ggml.scores", ARRAY, (FLOAT, [0.0]), "must be one of each of the 96 tokens, has 1"),
    ("tokenizer.ggml.scores", ARRAY, (STRING, ["x"]), "tokenizer.ggml.scores=['x']: must be a list of numbers"),
    ("tokenizer.ggml.token_type", ARRAY, (5, [1, 1]), "must be one of each of the 96 tokens, has 2"),
    ("tokenizer.ggml.merges", ARRAY, (INT, [1]), "tokenizer.ggml.merges=[1]: must be a list of strings"),
    ("tokenizer.ggml.bos_token_id", INT, 96, "tokenizer.ggml.bos_token_id=96: must be an integer in 0..95"),
    ("tokenizer.ggml.padding_token_id", 5, -1, "tokenizer.ggml.padding_token_id=-1: must be an integer in 0..95"),
    ("tokenizer.ggml.unknown_token_id", STRING, "x", "tokenizer.ggml.unknown_token_id='x': must be an integer"),
    ("tokenizer.ggml.add_bos_token", STRING, "yes", "tokenizer.ggml.add_bos_token='yes': must be true or false"),
    ("tokenizer.chat_template", INT, 5, "tokenizer.chat_template=5: must be a string"),
)


def with_field(name, kind, value):
    """The tiny model with one field changed, or added."""
    others = [field(*other) for other in tiny_fields() if other[0] != name]
    return gguf([*others, field(name, kind, value)], *tiny_tensors())


@pytest.mark.parametrize("name, kind, value, words", FIELDS, ids=[f"{name}: {words}" for name, _, _, words in FIELDS])
def test_fields_of_a_gguf_model(name, kind, value, words, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(with_field(name, kind, value))
    with pytest.raises(ValueError) as caught:  # tensors that do not fit are told in as many lines
        load_model(path)
    assert "x.gguf: " in str(caught.value) and words in str(caught.value)


def test_tokens_of_a_million_characters_are_not_cut_at_every_place(tmp_path):
    others = [field(*other) for other in tiny_fields() if other[0] not in ("tokenizer.ggml.tokens", "tokenizer.chat_template")]
    tokens = next(value for name, _, (_, value) in (f for f in tiny_fields() if f[1] == ARRAY) if name.endswith(".tokens"))
    (tmp_path / "x.gguf").write_bytes(
        gguf([*others, field("tokenizer.ggml.tokens", ARRAY, (STRING, [*tokens[:-1], "b" * 10**6]))], *tiny_tensors()))
    refused(lambda: load_model(tmp_path / "x.gguf"), "x.gguf: tokenizer.ggml.tokens[95]='bbb", "of at most 1024 characters")
