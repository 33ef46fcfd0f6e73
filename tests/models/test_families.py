"""The families of `goldens/tiny_families.py`: parity with transformers, and every cache at full quality beside the full one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_families import COLUMNS, FAMILIES, POSITIONS, mxfp4_codes, tensors_of, write_checkpoint
from goldens.tiny_models import PREFILL, random_tokens
from helpers import logits_through_a_cache
from test_models import GOLDENS, forward

from lowrank_kv_jax import models
from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models import mxfp4

BLOCK = 8
METHODS = (
    "full",
    "single-svd:rank=1.0,rope=pre,sinks=2,recent=4",
    "static-pca:rank=1.0,sinks=2,recent=4",
    "kivi:bits=none,recent=8",
    "kvzip:keep=1.0,layers=uniform,sinks=2,recent=4",
    "momentkv:keep=1.0,sinks=2,recent=4",
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny model, loaded once."""
    return functools.cache(
        lambda name: models.load_model(write_checkpoint(tmp_path_factory.mktemp("tiny") / name, name), dtype=jnp.float32)
    )


@functools.cache
def golden():
    return dict(np.load(GOLDENS / "families.npz"))


# The others are quick without a cache: their experts and fused tensors are nothing that it sees. Of gpt_oss both are asked.
THROUGH_A_CACHE = {"gemma2", "gemma3_text", "smollm3", "phi3_longrope"}


def tokens_of(name):
    return jnp.asarray(random_tokens(FAMILIES[name]["vocab_size"]))


def through_cache(model, method, tokens):
    """Logits `[B, ., V]` of the prompt's last token and of every one after it."""
    moments = collect_moments(model, np.asarray(tokens)) if method.calibrated else None
    bases = method.fit(model.config.attention, moments) if method.calibrated else None
    return logits_through_a_cache(method, model, tokens, bases, PREFILL, 96, BLOCK)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name in THROUGH_A_CACHE else []) for name in FAMILIES])
def test_logits_are_those_of_transformers(name, loaded):
    model = loaded(name)
    logits = np.asarray(forward(model.config, model.params, tokens_of(name)))
    np.testing.assert_allclose(logits[:, POSITIONS, COLUMNS], golden()[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] if name not in (*THROUGH_A_CACHE, "gpt_oss") else []) for name in FAMILIES])
def test_a_cache_gives_the_logits_of_transformers(name, loaded):
    logits = through_cache(loaded(name), parse_method("full"), tokens_of(name))
    later = POSITIONS >= PREFILL - 1
    np.testing.assert_allclose(
        logits[:, POSITIONS[later] - PREFILL + 1, COLUMNS], golden()[name][:, later], atol=1e-4, rtol=0
    )


REFUSED = {("gemma2", "momentkv:keep=1.0,sinks=2,recent=4"): "'momentkv' sums up dropped tokens .* caps its logits"}


@pytest.mark.parametrize("name, spec", REFUSED)
def test_what_a_method_cannot_do_for_a_family_it_says(name, spec, loaded):
    with pytest.raises(ValueError, match=REFUSED[name, spec]):
        through_cache(loaded(name), parse_method(spec), tokens_of(name))


def compressed():
    """Every family with every method; one is quick once."""
    for name in FAMILIES:
        for column, spec in enumerate(METHODS[1:]):
            quick = (name, column) == ("phi3_longrope", 1)
            if (name, spec) not in REFUSED:
                yield pytest.param(name, spec, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("name, spec", list(compressed()))
def test_at_full_quality_every_kind_of_cache_is_the_full_one(name, spec, loaded):
    exact = through_cache(loaded(name), parse_method("full"), tokens_of(name))
    logits = through_cache(loaded(name), parse_method(spec), tokens_of(name))
    np.testing.assert_allclose(logits, exact, atol=3e-4, rtol=0)


@pytest.mark.slow
def test_what_tells_the_families_apart_matters_in_the_goldens(loaded):
    """A golden that a plainer model also met would test nothing."""
    for name, change in CHANGES:
        model = loaded(name)
        config = dataclasses.replace(model.config, **change(model.config))
        changed = np.asarray(forward(config, model.params, tokens_of(name)))[:, POSITIONS, COLUMNS]
        assert np.abs(changed - golden()[name]).max() > 1e-2, name


CHANGES = (
    ("gemma2", lambda config: {"logit_cap": None}),
    ("gemma3_text", lambda config: {"ropes": config.ropes[:1] * 4, "rope": config.ropes[0]}),
    ("smollm3", lambda config: {"ropes": None}),
    ("smollm3_listed", lambda config: {"ropes": None, "windows": (None,) * config.num_layers}),
    ("phi3", lambda config: {"windows": (None,) * config.num_layers}),
    ("phi3_longrope", lambda config: {"rope_magnitude": 1.0}),
    ("mixtral", lambda config: {"moe": dataclasses.replace(config.moe, normalised=False)}),
    ("qwen3_moe_mixed", lambda config: {"moe": dataclasses.replace(config.moe, normalised=True)}),
    ("gpt_oss", lambda config: {"windows": config.windows[::-1]}),
    ("gpt_oss", lambda config: {"rope": dataclasses.replace(config.rope, truncate=True)}),
    ("gpt_oss", lambda config: {"moe": dataclasses.replace(config.moe, clamp=(1.702, 7.0))}),
)


@pytest.mark.slow
def test_sinks_matter_in_the_goldens(loaded):
    model = loaded("gpt_oss")
    layers = [{**layer, "attention": layer["attention"] | {"sinks": jnp.full(4, -1e9)}} for layer in model.params["layers"]]
    logits = np.asarray(forward(model.config, model.params | {"layers": layers}, tokens_of("gpt_oss")))
    assert np.abs(logits[:, POSITIONS, COLUMNS] - golden()["gpt_oss"]).max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_directories_that_lack_a_tensor_or_have_another_shape_are_refused(name, tmp_path):
    from safetensors.numpy import save_file

    directory, tensors = write_checkpoint(tmp_path / name, name), tensors_of(FAMILIES[name])
    wrong = max(tensors, key=lambda key: ".layers.1." in key and tensors[key].ndim == 2)
    save_file(tensors | {wrong: tensors[wrong][:-1]}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"misshapen: {wrong} is"):
        models.load_model(directory)
    del tensors[wrong]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing: {wrong}"):
        models.load_model(directory)


@pytest.mark.parametrize("name, change, message", [
    ("phi3", {"model_type": "gemma4"}, "model_type 'gemma4' is not supported; it must be one of"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}},
     "quant_method='fp8' is not read, only 'mxfp4'; load a checkpoint that was dequantised to bfloat16"),
    ("gpt_oss", {"swiglu_limit": -1}, "swiglu_limit=-1 is not a finite number in 0..inf"),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"missing \['original_max_position_embeddings'\]"),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "truncate": 1}}, "rope truncate=1: must be true or false"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0 is not a finite number in 1..inf"),
    ("phi3", {"attention_bias": True}, "attention_bias=True is not supported, only False"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
    ("phi3_longrope", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, r"missing \['long_factor'\]"),
    ("phi3_longrope", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
     "rope divisors: must be 6 finite numbers above 0"),
    ("phi3_longrope", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": "2"}},
     "rope long_factor='2': must be a list of finite numbers"),
    ("mixtral", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     "rope_parameters and rope_scaling say different things: leave one out"),
    ("mixtral", {"num_experts_per_tok": 5}, r"experts_per_token=5: must lie in 1..4"),
    ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": None}, "must hold 'full_attention' and 'sliding_attention'"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3' is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]: must hold an entry for each of 4 layers"),
    ("qwen3_moe", {"num_experts": None}, "num_experts=None, num_experts_per_tok=3, .*: must all be given"),
    ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers='1' is not a list of integers"),
])
def test_what_cannot_be_honoured_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(FAMILIES[name] | change)


def test_what_a_config_leaves_out_is_what_its_family_means():
    plain = {"model_type": "mistral", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    assert models.read_config(plain).windows == (4096, 4096)
    assert models.read_config(plain | {"sliding_window": None}).windows == (None, None)
    assert models.read_config(plain | {"model_type": "qwen2"}).windows == (None, None)
    assert models.read_config(plain | {"model_type": "mixtral"}).rope.theta == 1e6


def test_weights_of_fused_tensors_are_their_parts(loaded):
    attention = loaded("phi3").params["layers"][0]["attention"]
    whole = tensors_of(FAMILIES["phi3"])["model.layers.0.self_attn.qkv_proj.weight"]
    parts = np.concatenate([attention[f"{name}_proj"]["kernel"] for name in "qkv"], axis=1)
    np.testing.assert_array_equal(parts, whole.T)


def test_interleaved_experts_are_gate_and_up(loaded):
    whole = tensors_of(FAMILIES["gpt_oss"])
    mlp, block = loaded("gpt_oss").params["layers"][0]["mlp"]["experts"], "model.layers.0.mlp.experts."
    for stored, names in (("gate_up_proj", ("gate", "up")), ("gate_up_proj_bias", ("gate_bias", "up_bias"))):
        parts = np.stack([mlp[name] for name in names], axis=-1)
        np.testing.assert_array_equal(parts.reshape(whole[block + stored].shape), whole[block + stored])


def test_mxfp4_weights_are_those_that_transformers_reads():
    found = mxfp4.decoded(*mxfp4_codes("mxfp4", (2, 64, 6)))
    np.testing.assert_array_equal(found, golden()["mxfp4"])


def test_a_checkpoint_in_mxfp4_is_the_dequantised_one(tmp_path):
    from safetensors.numpy import save_file

    directory = write_checkpoint(tmp_path / "model", "gpt_oss")
    plain, packed = (dict(tensors_of(FAMILIES["gpt_oss"])) for _ in range(2))
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = mxfp4_codes(name, packed.pop(name).shape)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = mxfp4.decoded(blocks, scales)
    models_of = []
    for tensors in (plain, packed):
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / "model.safetensors")
        models_of.append(models.load_model(directory, dtype=jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, *(model.params for model in models_of))
    del packed["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(packed, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model.layers.1.mlp.experts.down_proj \(8, 32, 64\)"):
        models.load_model(directory)


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_a_checkpoint_s(loaded):
    for name in FAMILIES:
        model = loaded(name)
        drawn = models.init_params(model.config, jax.random.key(0))
        assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, model.params)
