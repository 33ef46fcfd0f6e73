"""GGUF files: config, weights, quantised types, tokenizers, and what is said about damaged files."""

import functools
import json
from pathlib import Path

import chex
import gguf
import numpy as np
import pytest
from goldens.texts import TEXTS, sentencepiece_vocabulary
from goldens.tiny_models import CONFIGS, random_tensor

from lowrank_kv_jax import models
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.models.gguf_file import GgufFile, read_gguf
from lowrank_kv_jax.models.gguf_tokenizer import build_tokenizer
from lowrank_kv_jax.models.load import demo_model_path
from lowrank_kv_jax.models.parameters import params_of, stored_arrays
from lowrank_kv_jax.models.stored import StoredTensor

GOLDENS = Path(__file__).parents[1] / "goldens"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def interleave(weight, heads):
    """What llama's converter does to the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, name, kind=None, drop=(), keys=(), extra=(), silent=False, **changes):
    """A tiny model as a GGUF file: matrices of element type `kind`, vectors in float32; `silent` of its key heads."""
    hf = CONFIGS[name] | changes
    config, architecture = models.read_config(hf), ARCHITECTURES[hf["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.q_heads)
    if not silent:
        writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    if config.windows[0] is not None:
        writer.add_sliding_window(config.windows[0])
    if config.rope.scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)
    for key, value in dict(keys).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tokens, scores, types = sentencepiece_vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for info in stored_arrays(config):
        if info.gguf in drop:
            continue
        values = random_tensor(info.hf, info.stored_shape)
        heads = {"attn_q": config.q_heads, "attn_k": config.kv_heads}.get(info.gguf.split(".")[-2])
        if heads and architecture == "llama":
            values = interleave(values, heads)
        if kind is None or values.ndim == 1:
            writer.add_tensor(info.gguf, values)
        else:
            quant = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(info.gguf, gguf.quantize(values, quant), raw_dtype=quant)
    for tensor, values in dict(extra).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def expected(name, through=lambda values: values, **changes):
    def draw(info):
        stored = random_tensor(info.hf, info.stored_shape)
        stored = through(stored) if stored.ndim == 2 else stored
        return stored.T if info.transposed else stored

    return params_of(models.read_config(CONFIGS[name] | changes), draw)


@pytest.mark.parametrize(
    "name", ["llama2", "llama2_mha_bias", "llama2_tied", "longchat", "mistral", "qwen2", "qwen3"]
)
def test_file_gives_the_config_and_the_weights(tmp_path, name):
    model = models.load_model(write_gguf(tmp_path / "tiny.gguf", name))
    assert model.config == models.read_config(CONFIGS[name])
    assert model.name == "tiny"
    chex.assert_trees_all_equal(model.params, expected(name))


WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_element_types(tmp_path, kind):
    quant = gguf.GGMLQuantizationType[kind]
    model = models.load_model(write_gguf(tmp_path / "tiny.gguf", "llama2", kind=kind, **WIDE))
    through = lambda values: gguf.dequantize(gguf.quantize(values, quant), quant)  # noqa: E731
    chex.assert_trees_all_equal(model.params, expected("llama2", through, **WIDE))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_decode_as_in_transformers(tmp_path, kind):
    golden = np.load(GOLDENS / "quantised_blocks.npz")
    raw, values = golden[f"{kind}/bytes"], golden[f"{kind}/values"]
    (tmp_path / "blocks").write_bytes(b"skipped" + raw.tobytes())
    tensor = StoredTensor(tmp_path / "blocks", 7, raw.size, values.shape, kind)
    decoded = np.concatenate([slab for _, slab in tensor.slabs()])
    np.testing.assert_allclose(decoded, values, rtol=1e-5, atol=1e-5 * np.abs(values).max())


def test_slabs_of_a_large_tensor_join(tmp_path, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.stored.SLAB_ELEMENTS", 500)
    model = models.load_model(write_gguf(tmp_path / "tiny.gguf", "llama2", kind="Q8_0", **WIDE))
    quant = gguf.GGMLQuantizationType.Q8_0
    through = lambda values: gguf.dequantize(gguf.quantize(values, quant), quant)  # noqa: E731
    chex.assert_trees_all_equal(model.params, expected("llama2", through, **WIDE))


def llama3_divisors(original_context):
    plain = RopeSpec(500000.0, 12)
    scaled = RopeSpec(500000.0, 12, "llama3", 8.0, 1.0, 4.0, original_context)
    return (plain.inverse_frequencies() / scaled.inverse_frequencies()).astype(np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path):
    theta = {"rope_theta": 500000.0}
    path = write_gguf(
        tmp_path / "tiny.gguf", "llama2", extra={"rope_freqs.weight": llama3_divisors(8192)}, **theta
    )
    assert models.load_model(path).config.rope == RopeSpec(500000.0, 12, "llama3", 8.0, 1.0, 4.0, 8192)
    path = write_gguf(
        tmp_path / "odd.gguf", "llama2", extra={"rope_freqs.weight": llama3_divisors(64)}, **theta
    )
    with pytest.raises(ValueError, match="does not follow Llama 3.1's rule with factor 8"):
        models.load_model(path)


@pytest.mark.parametrize("keys", ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}))
def test_a_linear_factor_divides_beside_the_divisors(tmp_path, keys):
    """As llama.cpp: angle = position * freq_scale * theta / freq_factor."""
    def rope(divisors):
        path = write_gguf(tmp_path / "tiny.gguf", "llama2", keys=keys, extra={"rope_freqs.weight": divisors}, rope_theta=500000.0)
        return models.load_model(path).config.rope

    assert rope(np.ones(6, np.float32)) == RopeSpec(500000.0, 12, "linear", 4.0)
    wanted = RopeSpec(500000.0, 12).inverse_frequencies() / llama3_divisors(8192) / 4
    np.testing.assert_allclose(rope(llama3_divisors(8192)).inverse_frequencies(), wanted, rtol=1e-5)


def test_a_factor_of_no_scaling_divides_nothing(tmp_path):
    keys = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert models.load_model(write_gguf(tmp_path / "tiny.gguf", "llama2", keys=keys)).config.rope == RopeSpec(10000.0, 12)


def test_a_file_that_says_no_key_heads_has_one_for_each_query_head(tmp_path):
    model = models.load_model(write_gguf(tmp_path / "tiny.gguf", "mistral", num_key_value_heads=4, silent=True))
    assert model.config.kv_heads == 4


def test_tensors_that_do_not_fit_are_listed_by_their_gguf_names(tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf",
        "llama2",
        drop=("blk.1.ffn_up.weight", "output_norm.weight"),
        extra={"blk.0.ffn_gate_inp.weight": np.zeros((8, 48), np.float32)},
    )
    with pytest.raises(ValueError) as error:
        models.load_model(path)
    for line in (
        "missing: blk.1.ffn_up.weight (80, 48)",
        "missing: output_norm.weight (48,)",
        "extra: blk.0.ffn_gate_inp.weight (8, 48)",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"llama.expert_count": 8, "llama.attention.clamp_kqv": 1.5},
            "expert_count=8; llama.attention.clamp_kqv=1.5",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 6}, "rope.dimension_count is 6, it must equal the head_dim of 12"),
        ({"llama.block_count_limit": True}, "llama.block_count_limit=True"),
        ({"split.count": 2}, "split.count=2: must be 1; this is a part of a model"),
    ],
)
def test_metadata_that_the_decoder_does_not_honour(tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        models.load_model(write_gguf(tmp_path / "tiny.gguf", "llama2", keys=keys))


def test_unsupported_architecture_and_element_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bert.gguf", "bert")
    writer.add_tensor("a.weight", np.zeros((1, 110), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ3_S)
    writer.add_tensor("b.weight", np.zeros(4, np.int32))
    writer.add_tensor("c.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"unsupported type: a.weight \(IQ3_S\), b.weight \(I32\); read are"):
        models.load_model(tmp_path / "bert.gguf")
    writer = gguf.GGUFWriter(tmp_path / "empty.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'bert' is not supported"):
        models.load_model(tmp_path / "empty.gguf")


def test_truncated_and_foreign_files(tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf", "llama2").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 20, 60, 500, 3000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf: truncated"):
            models.load_model(path)
    for start, message in ((b"GGML", "not a GGUF file"), (b"GGUF\x09\0\0\0", "GGUF version 9 is not read")):
        path.write_bytes(start + whole[len(start) :])
        with pytest.raises(ValueError, match=message):
            models.load_model(path)


def test_any_damaged_byte_of_the_header_is_an_error_or_harmless(tmp_path):
    """No damaged length, type or count may end in a hang, a huge allocation or an error of another kind."""
    whole, rng = write_gguf(tmp_path / "tiny.gguf", "llama2").read_bytes(), np.random.default_rng(0)
    errors = 0
    for end in [1200] * 150 + [14000] * 50:
        damaged = bytearray(whole)
        damaged[rng.integers(8, end)] = rng.integers(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            models.load_model(tmp_path / "damaged.gguf")
        except ValueError:
            errors += 1
    assert errors > 50


@pytest.fixture(scope="module")
def demo_file():
    try:
        return read_gguf(demo_model_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@functools.cache
def golden_tokens():
    return json.loads((GOLDENS / "smollm2_tokens.json").read_text())


def test_demo_tokenizer_agrees_with_transformers(demo_file):
    tokenizer, golden = build_tokenizer(demo_file), golden_tokens()
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == golden["ids"][text], text
        assert tokenizer.decode(ids) == text
        # without the published rule for digits: the same but for numerals outside 0-9
        if not any(character.isnumeric() and not character.isascii() for character in text):
            assert ids == golden["as_read"][text], text


def test_demo_tokenizer_knows_its_special_tokens(demo_file):
    tokenizer = build_tokenizer(demo_file)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode([1, 504, 2], skip_special_tokens=True) == tokenizer.decode([504])
    assert tokenizer.model_max_length == 8192


def test_demo_chat_template(demo_file):
    pytest.importorskip("jinja2", reason="transformers renders chat templates with jinja2")
    messages = [{"role": "user", "content": "What is 2+2?"}]
    rendered = build_tokenizer(demo_file).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert rendered == golden_tokens()["chat"]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2"])
def test_other_byte_level_kinds_agree_with_transformers(demo_file, kind):
    tokenizer = build_tokenizer(
        GgufFile(demo_file.path, demo_file.metadata | {"tokenizer.ggml.pre": kind}, {})
    )
    for text in TEXTS:
        assert tokenizer(text).input_ids == golden_tokens()["others"][kind][text], text


def test_sentencepiece_agrees_with_transformers(tmp_path):
    tokenizer = build_tokenizer(read_gguf(write_gguf(tmp_path / "tiny.gguf", "llama2")))
    for text in TEXTS:
        assert (
            tokenizer(text, add_special_tokens=False).input_ids == golden_tokens()["others"]["llama"][text]
        ), text
    assert tokenizer("the world").input_ids[0] == 1
    assert (
        tokenizer.decode(tokenizer("the world, né 世").input_ids, skip_special_tokens=True)
        == "the world, né 世"
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported; it must be one of"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "has no tokenizer"),
    ],
)
def test_unknown_tokenizers_are_refused(change, message):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]} | change
    with pytest.raises(ValueError, match=message):
        build_tokenizer(GgufFile(Path("x.gguf"), metadata, {}))


@pytest.mark.parametrize(
    "asked, frame",
    [({}, []), ({"pre": "llama-bpe"}, [0]), ({"pre": "llama-bpe", "add_bos_token": False}, []), ({"add_bos_token": True}, [0]), ({"add_bos_token": True, "add_eos_token": True}, [0, 1])],
)
def test_sequences_are_framed_as_the_file_asks(asked, frame):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<b>", "<e>", "a"],
        "tokenizer.ggml.token_type": [3, 3, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in asked.items()}
    tokenizer = build_tokenizer(GgufFile(Path("x.gguf"), metadata, {}))
    assert tokenizer("aa").input_ids == frame[:1] + [2, 2] + frame[1:]
    assert tokenizer("a", add_special_tokens=False).input_ids == [2]


def test_a_file_that_does_not_say_how_text_is_cut_warns():
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.warns(UserWarning, match="x.gguf: does not say how text is cut"):
        build_tokenizer(GgufFile(Path("x.gguf"), metadata, {}))
