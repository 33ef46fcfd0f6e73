"""GPT-2 and GPT-NeoX (Pythia): parity with transformers, checkpoints, and what their caches differ in."""

import dataclasses
import functools
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import GPT_CONFIGS, PREFILL, random_tensor
from safetensors.numpy import save_file

from lowrank_kv_jax import models
from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.generation.forward import extend, layer_prefill, prefill, refresh
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.decoder import embed, init_params, unembed
from lowrank_kv_jax.models.load import LoadedModel
from lowrank_kv_jax.models.parameters import params_of, stored_arrays

GOLDENS = Path(__file__).parents[1] / "goldens" / "gpt.npz"
every_model = pytest.mark.parametrize("name", sorted(GPT_CONFIGS))


@functools.cache
def tiny(name):
    """Config and the weights that the golden script gave to transformers."""
    config = models.read_config(GPT_CONFIGS[name])

    def draw(info):
        value = random_tensor(info.hf, info.stored_shape)
        return jnp.asarray(value.T if info.transposed else value)

    return config, params_of(config, draw)


def forward(config, params, tokens):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = embed(config, params, tokens)
    for layer in params["layers"]:
        x, _ = layer_prefill(config, None, layer, x, positions)
    return np.asarray(unembed(config, params, x))


@every_model
def test_logits_equal_transformers(name):
    golden, (config, params) = np.load(GOLDENS), tiny(name)
    logits = forward(config, params, golden[f"{name}/tokens"])
    np.testing.assert_allclose(logits, golden[f"{name}/logits"], atol=1e-4, rtol=0)


def test_what_tells_the_families_apart_matters_in_the_goldens():
    golden = np.load(GOLDENS)
    changes = {
        "gpt2": {"activation": "gelu"}, "gpt_neox": {"parallel_residual": False},
        "gpt_neox_serial": {"rope": dataclasses.replace(tiny("gpt_neox_serial")[0].rope, rotary_dim=6)},
    }
    for name, change in changes.items():
        config, params = tiny(name)
        changed = forward(dataclasses.replace(config, **change), params, golden[f"{name}/tokens"])
        assert np.abs(changed - golden[f"{name}/logits"]).max() > 1e-4, name


@pytest.mark.parametrize("name, spec", [
    ("gpt2", "full"), pytest.param("gpt_neox", "full", marks=pytest.mark.slow),
    pytest.param("gpt2", "osp:rank=1.0,sinks=4,recent=8,chunk_length=16", marks=pytest.mark.slow),
    ("gpt_neox", "static-pca-h:rank=1.0,rope=pre,sinks=4,recent=8"),
])
def test_decoding_through_a_cache_equals_the_whole_text(name, spec):
    """Learned positions follow the cache; channels that do not rotate are rebuilt as they were."""
    (config, params), golden = tiny(name), np.load(GOLDENS)
    tokens, method = jnp.asarray(golden[f"{name}/tokens"]), parse_method(spec)
    loaded = LoadedModel(name, config, params, None, "a" * 64)
    bases = method.fit(config.attention, collect_moments(loaded, np.asarray(tokens))) if method.calibrated else None
    cache, logits = prefill(method, config, params, tokens[:, :PREFILL], bases=bases, capacity=72, block=8, dtype=jnp.float32)
    out = [logits]
    for begin in range(PREFILL, 71, 6):
        cache, logits = extend(method, config, params, cache, tokens[:, begin : begin + 6], bases=bases)
        cache = refresh(method, cache, bases=bases)
        out.append(logits)
    at = [PREFILL - 1, *range(PREFILL + 5, 71, 6)]
    np.testing.assert_allclose(np.stack(out[: len(at)], 1), golden[f"{name}/logits"][:, at], atol=2e-4)


@pytest.mark.parametrize("name, prefix", [*((name, "") for name in GPT_CONFIGS), ("gpt2", "transformer.")])
def test_directories_load(name, prefix, tmp_path):
    """With and without the prefix of language models, with the masks and the tied heads that old checkpoints carry."""
    config, params = tiny(name)
    tensors = {prefix + info.hf: random_tensor(info.hf, info.stored_shape) for info in stored_arrays(config)}
    layer = f"{prefix}h.0.attn" if config.family == "gpt2" else "gpt_neox.layers.0.attention"
    mask = np.float32 if config.family == "gpt2" else np.uint8  # as Pythia has them
    tensors |= {f"{layer}.bias": np.ones((1, 1, 4, 4), mask), f"{layer}.masked_bias": np.ones(1, np.float32)}
    if config.tie_embeddings:
        tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT_CONFIGS[name]))
    loaded = models.load_model(tmp_path)
    assert loaded.config == config
    chex.assert_trees_all_equal(loaded.params, params)


@pytest.mark.parametrize("name, change, message", [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
    ("gpt2", {"activation_function": "relu"}, "activation 'relu' is not supported"),
    ("gpt2", {"n_head": 5}, "5 heads do not divide the hidden size 48"),
    ("gpt2", {"n_hed": 5}, "n_hed=5 is not known"),
    ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling|scaling"),
    ("gpt_neox", {"attention_bias": False}, "attention_bias=False is not supported"),
])
def test_what_is_not_implemented_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(GPT_CONFIGS[name] | change)


def test_without_a_rotary_embedding_both_sides_of_it_are_one():
    config, params = tiny("gpt2")
    tokens = jnp.arange(40)[None] % config.vocab_size
    pre, post = (prefill(parse_method(f"single-svd:rank=12,sinks=4,recent=8,rope={side}"), config, params, tokens,
                         dtype=jnp.float32)[1] for side in ("pre", "post"))
    np.testing.assert_allclose(pre, post, atol=1e-5)


def test_methods_that_need_rope_say_so():
    config, params = tiny("gpt2")
    with pytest.raises(ValueError, match="does not rotate all channels"):
        parse_method("osp:rank=4,rope=pre,rotary=true").validate(tiny("gpt_neox")[0].attention)
    assert init_params(config, jax.random.key(0))["positions"]["embedding"].shape == (128, 48)
