"""DeepSeek-V2: latent attention, the mixture of experts, and caches of latents."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import DEEPSEEK, PREFILL, random_tensor
from test_models import GOLDENS

from lowrank_kv_jax import models
from lowrank_kv_jax.calibration.calibrate import collect_moments
from lowrank_kv_jax.evals.studies.cross_layer.analysis import analyse
from lowrank_kv_jax.evals.studies.cross_layer.latents import pair_similarity
from lowrank_kv_jax.evals.studies.cross_layer.plot import plot_analysis
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.method.accounting import cache_bytes, full_cache_bytes
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.experts import Experts
from lowrank_kv_jax.models.parameters import params_of, stored_arrays


@functools.cache
def tiny(family):
    config = models.read_config(DEEPSEEK[family])

    def draw(info):
        drawn = [random_tensor(name, info.stored_shape) for name in info.names("hf")]
        drawn = [x.T if info.transposed else x for x in drawn]
        return jnp.asarray(np.stack(drawn) if info.stacked else drawn[0])

    return config, params_of(config, draw)


@functools.cache
def golden():
    return dict(np.load(GOLDENS / "deepseek.npz"))


def through_cache(method, family, width=31, dtype=jnp.float32, **options):
    """The last cache, and logits `[B, 1 + ., V]` after the prompt and after every piece."""
    config, params = tiny(family)
    tokens = jnp.asarray(golden()[f"{family}/tokens"])
    cache, logits = prefill(
        method, config, params, tokens[:, :PREFILL], capacity=128, block=width, dtype=dtype, **options
    )
    out = [logits[:, None]]
    for begin in range(PREFILL, tokens.shape[1], width):
        cache, logits = extend(method, config, params, cache, tokens[:, begin : begin + width], all_logits=True)
        out.append(logits)
        cache = refresh(method, cache)
    return cache, np.concatenate(out, axis=1)


@pytest.mark.parametrize("family", [  # of the lite one MiniCache gives them below
    pytest.param(family, marks=[pytest.mark.slow] if family == "deepseek_v2_lite" else []) for family in DEEPSEEK])
def test_logits_are_those_of_transformers(family):
    """The prompt with whole heads, the rest with absorbed projections through a cache of latents."""
    _, logits = through_cache(parse_method("full"), family)
    np.testing.assert_allclose(logits, golden()[f"{family}/logits"][:, PREFILL - 1 :], atol=1e-4, rtol=0)


def oracle(family, rebuilt=None):
    """Logits of the text, later tokens reading `rebuilt` latents `[L, B, S, r]` of the prompt, and its own latents."""
    config, params = tiny(family)
    return tuple(map(np.asarray, read_text(config, params, golden()[f"{family}/tokens"], rebuilt)))


@functools.partial(jax.jit, static_argnums=0)
def read_text(config, params, tokens, rebuilt):
    spec = config.attention
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    seen = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    rotary = spec.head_dim - spec.latent.rank
    x, latents = models.embed(config, params, tokens), []
    for layer in params["layers"]:
        taps = models.block_taps(config, layer, x, positions)
        latent = taps.k_pre[:, :, 0, rotary:]
        read = latent if rebuilt is None else latent.at[:, :PREFILL].set(rebuilt[len(latents)])
        latents.append(latent[:, :PREFILL])
        parts = []
        for rows, own in ((slice(PREFILL), latent), (slice(PREFILL, None), read)):
            normed = own / jnp.sqrt(jnp.mean(own**2, axis=-1, keepdims=True) + 1e-6)
            keys = jnp.concatenate([taps.k[:, :, 0, :rotary], normed], axis=-1)
            scores = jnp.einsum("btnd,bsd->bnts", taps.q[:, rows], keys) * spec.scale
            weights = jax.nn.softmax(jnp.where(seen[rows], scores, -jnp.inf), axis=-1)
            parts.append(jnp.einsum("bnts,bsd->btnd", weights, keys))
        x = models.block_output(config, layer, x, jnp.concatenate(parts, axis=1))
    return models.unembed(config, params, x), jnp.stack(latents)


@pytest.mark.parametrize("fields", [pytest.param("sinks=0,recent=0", marks=pytest.mark.slow), "sinks=4,recent=3"])
def test_latents_are_compressed_before_their_norm_and_rotary_keys_are_not(fields):
    """Against numpy's SVD of the prompt's latents, three layers side by side; what comes after the prompt is exact."""
    family, rank = "deepseek_v2_lite", 20
    method = parse_method(f"xkv:group=3,rank={rank},{fields}")
    _, latents = oracle(family)
    coded = slice(method.sinks, PREFILL - method.recent)
    joint = np.concatenate(latents.astype(np.float64), axis=-1)[:, coded]
    u, s, v = np.linalg.svd(joint, full_matrices=False)
    lossy = (u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]
    assert 0.01 < np.sum((lossy - joint) ** 2) / np.sum(joint**2) < 0.5
    rebuilt = latents.copy()
    rebuilt[:, :, coded] = np.stack(np.split(lossy, 3, axis=-1))
    expected, _ = oracle(family, rebuilt)
    _, logits = through_cache(method, family)
    np.testing.assert_allclose(logits, expected[:, PREFILL - 1 :], atol=2e-4)
    assert np.abs(logits - golden()[f"{family}/logits"][:, PREFILL - 1 :]).max() > 0.05


@pytest.mark.parametrize("bits", ["8", pytest.param("6.5", marks=pytest.mark.slow)])
def test_full_rank_is_exact_and_many_bits_are_close(bits):
    family = "deepseek_v2"
    expected = golden()[f"{family}/logits"][:, PREFILL - 1 :]
    _, logits = through_cache(parse_method("xkv:group=2,rank=1.0,sinks=4,recent=4"), family)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    _, coarse = through_cache(parse_method(f"xkv:group=2,rank=1.0,sinks=4,recent=4,bits={bits},basis_dtype=int8"), family)
    # the median: routing is discontinuous, so that a small error may send a token to other experts
    assert 1e-4 < np.median(np.abs(coarse - expected)[:, 1:]) < 0.1


def test_decoding_token_by_token_is_the_same_and_compiles_once():
    family, method = "deepseek_v2", parse_method("xkv:group=2,rank=1.0,sinks=4,recent=4")
    config, params = tiny(family)
    tokens = jnp.asarray(golden()[f"{family}/tokens"])
    cache, _ = prefill(method, config, params, tokens[:, :PREFILL], capacity=64, dtype=jnp.float32)
    once = chex.assert_max_traces(lambda cache, token: extend(method, config, params, cache, token), n=1)
    step = jax.jit(once, donate_argnums=0)
    for at in range(PREFILL, PREFILL + 4):
        cache, logits = step(cache, tokens[:, at : at + 1])
        np.testing.assert_allclose(logits, golden()[f"{family}/logits"][:, at], atol=2e-4)


def test_bytes_are_those_of_latents():
    config, params = tiny("deepseek_v2")
    tokens = jnp.tile(jnp.asarray(golden()["deepseek_v2/tokens"])[:1], (1, 7))[:, :480]
    roomy = dataclasses.replace(config, context=1024)
    cache, _ = prefill(parse_method("full"), roomy, params, tokens)
    assert cache_bytes(cache).by_kind["exact"] == 2 * 3 * (24 + 8) * 512 == full_cache_bytes(roomy.attention, 512)
    cache, _ = prefill(parse_method("xkv:smaller=1.7,sinks=0,recent=0,group=3"), roomy, params, tokens)
    held = cache_bytes(cache)
    assert 1.7 <= held.smaller < 1.9
    assert held.by_kind["exact"] == 2 * 3 * (480 * 8 + 32 * 32)  # rotary keys of the prompt, all of what follows


def test_two_layers_latents_share_a_direction_and_their_rotary_keys_are_exact():
    """MiniCache on the last two of three layers, against numpy: the half of the tokens whose latents differ most is kept."""
    family, t = "deepseek_v2_lite", 0.6
    _, latents = oracle(family)
    first, second = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in latents[1:].astype(np.float64))
    omega = np.arccos(np.sum(first * second, axis=-1))
    merged = (np.sin((1 - t) * omega)[..., None] * first + np.sin(t * omega)[..., None] * second) / np.sin(omega)[..., None]
    near = np.argsort(np.argsort(omega, axis=1), axis=1) < PREFILL - PREFILL // 2
    rebuilt = latents.copy()
    for layer in (1, 2):
        length = np.linalg.norm(latents[layer], axis=-1, keepdims=True)
        rebuilt[layer] = np.where(near[..., None], merged * length, latents[layer])
    expected, _ = oracle(family, rebuilt)
    cache, logits = through_cache(parse_method("minicache:start=1,keep=0.5"), family)
    np.testing.assert_allclose(logits, expected[:, PREFILL - 1 :], atol=2e-4)
    assert np.abs(logits - golden()[f"{family}/logits"][:, PREFILL - 1 :]).max() > 0.05
    store = cache.groups[1].store
    assert store.merged.k.shape[-1] == 24 and store.merged.rotary.shape[-1] == 2 * 8 and store.merged.v is None
    assert store.retained[0].v.size == 0
    _, logits = through_cache(parse_method("minicache:start=0,keep=1.0"), family)
    np.testing.assert_allclose(logits, golden()[f"{family}/logits"][:, PREFILL - 1 :], atol=1e-4)


@pytest.mark.slow
def test_chunks_of_latents_are_merged_as_the_whole_prompt_is():
    """The first layer's keys do not depend on what is attended to."""
    (config, params), method = tiny("deepseek_v2_lite"), parse_method("minicache:start=0,keep=0.0")
    tokens = jnp.asarray(golden()["deepseek_v2_lite/tokens"])[:, :PREFILL]
    whole, chunked = (
        prefill(method, config, params, tokens, capacity=128, dtype=jnp.float32, chunk=chunk)[0].groups[0].store.merged
        for chunk in (None, PREFILL // 2))
    np.testing.assert_array_equal(whole.length, chunked.length)
    np.testing.assert_array_equal(whole.positions.position, chunked.positions.position)
    np.testing.assert_allclose(whole.rotary[..., :8], chunked.rotary[..., :8], atol=1e-5)
    np.testing.assert_allclose(whole.k[:, :, : PREFILL // 2], chunked.k[:, :, : PREFILL // 2], atol=1e-5)


@pytest.mark.slow
def test_few_tokens_pass_the_same_experts_as_many():
    config, params = tiny("deepseek_v2")
    from lowrank_kv_jax.models.decoder import _bind

    experts = _bind(params["layers"][1]["mlp"], Experts, config)
    x = jax.random.normal(jax.random.key(0), (2, 5, config.hidden_size))
    weights, chosen = experts.route(x.reshape(10, -1))
    groups = np.asarray(chosen) // 2  # eight experts in four groups, of which a token may use two
    assert all(len(set(row)) <= 2 for row in groups) and len(np.unique(groups)) == 4
    args = (x.reshape(10, -1), weights, chosen)
    np.testing.assert_allclose(experts._gathered(*args), experts._sorted(*args), atol=1e-5)
    np.testing.assert_allclose(experts(x[:1, :2]), experts(x)[:1, :2], atol=1e-5)


def test_latents_of_layers_are_analysed(tmp_path):
    config, params = tiny("deepseek_v2_lite")
    model = models.LoadedModel("tiny", config, params, None, "")
    analysis = analyse(model, golden()["deepseek_v2_lite/tokens"][0], sizes=(1, 3))
    _, latents = oracle("deepseek_v2_lite")
    x = np.asarray(latents[:, 0], np.float64)
    prompt = analyse(model, golden()["deepseek_v2_lite/tokens"][0, :PREFILL], sizes=(1, 3))
    expected = np.mean(np.sum(x[0] * x[2], -1) / np.linalg.norm(x[0], axis=-1) / np.linalg.norm(x[2], axis=-1))
    np.testing.assert_allclose(prompt.cosine["latents"][0, 2], expected, atol=1e-5)
    assert [width for _, width in analysis.ranks["latents"][3]] == [72]
    plot_analysis(tmp_path / "figure.png", analysis)
    latents_alone = {row.what: row for row in pair_similarity(model, golden()["deepseek_v2_lite/tokens"][0], 0.5)}
    assert {what: row.width for what, row in latents_alone.items()} == {"latents": 24, "coefficients of latents": 12}
    np.testing.assert_allclose(latents_alone["latents"].cosine, np.diagonal(analysis.cosine["latents"], 1), atol=1e-5)


# ---- bad input, checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True is not supported, only False"),
        ({"n_expert_bias": 1}, "n_expert_bias=1 is not known"),
        ({"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ({"num_experts_per_tok": 9}, r"experts_per_token=9: must lie in 1..8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"missing \['original_max_position_embeddings'\]"),
    ],
)
def test_config_refuses_values_it_cannot_honour(change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(DEEPSEEK["deepseek_v2_lite"] | change)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("kivi", "method 'kivi' compresses keys and values; this model caches latents"),
        ("xkv:rank_k=4,rank_v=4", "rank_k=4: this model caches one latent"),
        ("xkv:recompress=8", "recompress=8: this model caches one latent"),
        ("xkv:rank=73,group=3", "rank=73: must lie in 1..72"),
    ],
)
def test_methods_that_do_not_suit_are_refused(spec, message):
    config, params = tiny("deepseek_v2_lite")
    with pytest.raises(ValueError, match=message):
        prefill(parse_method(spec), config, params, jnp.ones((1, 40), jnp.int32), capacity=64)


def test_latents_are_not_calibrated():
    config, params = tiny("deepseek_v2_lite")
    with pytest.raises(ValueError, match="this model caches latents"):
        collect_moments(models.LoadedModel("tiny", config, params, None, ""), np.ones((1, 8), np.int32))


def test_a_checkpoint_s_experts_are_stacked(tmp_path):
    from safetensors.numpy import save_file

    config, params = tiny("deepseek_v2")
    tensors = {
        name: random_tensor(name, info.stored_shape)
        for info in stored_arrays(config)
        for name in info.names("hf")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK["deepseek_v2"]))
    loaded = models.load_model(tmp_path, dtype=jnp.float32)
    assert loaded.config == config
    chex.assert_trees_all_equal(loaded.params, params)
    missing = "model.layers.2.mlp.experts.7.down_proj.weight"
    save_file({name: x for name, x in tensors.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing: {missing}"):
        models.load_model(tmp_path)


def test_random_weights_have_the_shapes_of_the_table():
    config, params = tiny("deepseek_v2_lite")
    drawn = models.init_params(config, jax.random.key(0))
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(jnp.std(drawn["layers"][1]["mlp"]["experts"]["gate"]), 48**-0.5, rtol=0.1)
