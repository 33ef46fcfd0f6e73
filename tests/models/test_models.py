"""The decoder against transformers' logits (goldens of `goldens/make_model_goldens.py`)."""

import dataclasses
import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens.tiny_models import CONFIGS, random_tensor
from jax.sharding import PartitionSpec as P

from lowrank_kv_jax import models
from lowrank_kv_jax.models.parameters import params_of

GOLDENS = Path(__file__).parents[1] / "goldens"
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@functools.cache
def tiny_goldens():
    return dict(np.load(GOLDENS / "tiny_models.npz"))


def tiny_params(config):
    """The weights that the golden script gave to transformers."""

    def draw(info):
        stored = random_tensor(info.hf, info.stored_shape)
        return jnp.asarray(stored.T if info.transposed else stored)

    return params_of(config, draw)


OPTIMISED = {"xla_backend_optimization_level": 3}
"""One program of a layer: on a real model it runs far longer than it compiles."""


def attend(spec, window, taps):
    """Plain exact attention of one layer, causal, windowed, capped and with sinks, float32 `[B, T, N, D]`."""
    query = jnp.arange(taps.q.shape[1])
    seen = query[None, :] <= query[:, None]
    if window is not None:
        seen &= query[None, :] > query[:, None] - window
    k, v = (jnp.repeat(x, spec.group_size, axis=2) for x in (taps.k, taps.v))
    scores = jnp.einsum("btnd,bsnd->bnts", taps.q, k).astype(jnp.float32) * spec.scale
    scores = scores if spec.logit_cap is None else spec.logit_cap * jnp.tanh(scores / spec.logit_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    if taps.sink_logits is not None:
        sinks = jnp.broadcast_to(taps.sink_logits[:, None, None], (*scores.shape[:3], 1))
        scores, v = jnp.concatenate([scores, sinks], axis=-1), jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), v)


def forward(config, params, tokens):
    """float32 logits `[B, T, V]` of a whole sequence."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = models.embed(config, params, tokens)
    for own, window, layer in zip(config.by_layer, config.windows, params["layers"], strict=True):
        x = layer_forward(own, window, layer, x, positions)
    return jax.jit(models.unembed, static_argnums=0)(config, params, x)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=OPTIMISED)
def layer_forward(config, window, layer, x, positions):
    taps = models.block_taps(config, layer, x, positions)
    return models.block_output(config, layer, x, attend(config.attention, window, taps))


BY_STEPS = {"llama3.1", "longchat", "mistral", "qwen2", "qwen2_window", "qwen3"}  # quick in `test_cache_parity`


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.slow] if family in BY_STEPS else []) for family in CONFIGS])
def test_logits_of_every_family_are_those_of_transformers(family):
    config, golden = models.read_config(CONFIGS[family]), tiny_goldens()
    logits = forward(config, tiny_params(config), golden[f"{family}/tokens"])
    np.testing.assert_allclose(logits, golden[f"{family}/logits"], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_windows_and_scaling_matter_in_the_goldens():
    """A golden that the plain variant also met would test nothing."""
    golden = tiny_goldens()
    for family, plain in [
        ("mistral", {"windows": (None,) * 3}),
        ("qwen2_window", {"windows": (None,) * 3}),
        ("longchat", {"rope": None}),
        ("llama3.1", {"rope": None}),
    ]:
        config = models.read_config(CONFIGS[family])
        if "rope" in plain:
            plain = {"rope": dataclasses.replace(config.rope, scaling="default")}
        changed = forward(
            dataclasses.replace(config, **plain), tiny_params(config), golden[f"{family}/tokens"]
        )
        assert np.abs(changed - golden[f"{family}/logits"]).max() > 1e-2, family


@pytest.fixture(scope="module")
def smollm2():
    try:
        return models.load_model("smollm2-135m", dtype=jnp.float32)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_smollm2_logits_are_those_of_transformers(smollm2):
    golden = np.load(GOLDENS / "smollm2.npz")
    logits = np.asarray(forward(smollm2.config, smollm2.params, golden["tokens"][None]))[0]
    # float32 itself resolves logits of 30 to 2e-6; the second term leaves room for another order of summation
    np.testing.assert_allclose(
        logits[np.ix_(golden["positions"], golden["columns"])], golden["logits"], atol=1e-4, rtol=3e-6
    )
    np.testing.assert_array_equal(logits.argmax(-1), golden["argmax"])


@pytest.mark.slow
def test_smollm2_greedy_tokens_are_those_of_transformers(smollm2):
    """Each golden token is the argmax after its predecessors, so decoding gives the same 64."""
    golden = np.load(GOLDENS / "smollm2.npz")
    tokens = np.concatenate([golden["tokens"], golden["greedy"]])
    logits = forward(smollm2.config, smollm2.params, tokens[None, :-1])
    np.testing.assert_array_equal(
        np.asarray(logits)[0, len(golden["tokens"]) - 1 :].argmax(-1), golden["greedy"]
    )


@pytest.fixture(scope="module")
def small():
    config = models.read_config(SMALL)
    return config, models.init_params(config, jax.random.key(0))


def test_one_trace_of_a_layer_serves_all_layers(small):
    config, params = small

    @jax.jit
    @chex.assert_max_traces(n=1)
    def taps(layer, x, positions):
        return models.block_taps(config, layer, x, positions)

    x, positions = jnp.ones((1, 3, config.hidden_size)), jnp.arange(3)[None]
    for layer in params["layers"]:
        taps(layer, x, positions)


def test_taps_have_the_documented_shapes_and_relations(small):
    config, params = small
    x = jax.random.normal(jax.random.key(1), (2, 5, config.hidden_size))
    positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
    taps = models.block_taps(config, params["layers"][0], x, positions)
    assert taps.q.shape == (2, 5, 4, 8)
    assert taps.k.shape == taps.k_pre.shape == taps.v.shape == (2, 5, 2, 8)
    assert taps.x.shape == x.shape
    np.testing.assert_allclose(taps.k[:, 0], taps.k_pre[:, 0], atol=1e-6)  # position 0 is not rotated
    assert np.abs(taps.k[:, 1:] - taps.k_pre[:, 1:]).max() > 0.1
    np.testing.assert_allclose(jnp.mean(taps.k_pre**2, -1), 1.0, rtol=1e-3)  # the tap lies after the k-norm


def test_bfloat16_weights_stay_bfloat16_and_logits_are_float32(small):
    config, params = small
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    tokens = jnp.arange(12)[None]
    assert models.embed(config, half, tokens).dtype == jnp.bfloat16
    layer = models.block_taps(
        config, half["layers"][0], models.embed(config, half, tokens), jnp.arange(12)[None]
    )
    assert {tap.dtype for tap in jax.tree.leaves(layer)} == {jnp.dtype(jnp.bfloat16)}
    logits = forward(config, half, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, forward(config, params, tokens), atol=0.2)


def test_axes_name_every_dimension(small):
    config, params = small
    is_axes = lambda leaf: isinstance(leaf, tuple) and all(a is None or isinstance(a, str) for a in leaf)  # noqa: E731
    axes, treedef = jax.tree.flatten(models.param_axes(config), is_leaf=is_axes)
    weights, expected = jax.tree.flatten(params)
    assert treedef == expected
    assert [len(a) for a in axes] == [w.ndim for w in weights]


def test_shardings_cut_heads_only_where_whole(small):
    config, _ = small
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    for sharding in jax.tree.leaves(models.param_shardings(config, mesh)):
        assert sharding.mesh.devices.tolist() == mesh.devices.tolist()
        assert set(sharding.mesh.axis_types) == {jax.sharding.AxisType.Auto}  # those of `jax.make_mesh` are explicit
    fake = jax.sharding.AbstractMesh((1, 3), ("data", "model"))
    with pytest.raises(ValueError, match="model=3 must divide kv_heads=2"):
        models.param_shardings(config, fake)
    two = models.param_shardings(config, jax.sharding.AbstractMesh((2, 2), ("data", "model")))
    layer = two["layers"][0]
    assert layer["attention"]["q_proj"]["kernel"].spec == P(None, "model")
    assert layer["attention"]["o_proj"]["kernel"].spec == P("model", None)
    assert layer["mlp"]["gate_up"]["kernel"].spec == P(None, None, "model")
    assert layer["attention"]["q_norm"]["scale"].spec == P(None)
    assert two["embed"]["embedding"].spec == P("model", None)


def test_config_reads_both_spellings_of_rope_scaling():
    new = {key: value for key, value in CONFIGS["llama3.1"].items() if not key.startswith("rope")}
    new["rope_parameters"] = CONFIGS["llama3.1"]["rope_scaling"] | {"rope_theta": 500000.0}
    assert models.read_config(new) == models.read_config(CONFIGS["llama3.1"])


@pytest.mark.filterwarnings("error")
def test_a_model_of_dual_chunks_is_read_and_says_that_they_are_not_applied():
    """The attribute of Qwen2.5-7B-Instruct-1M."""
    plain = SMALL | {"model_type": "qwen2"}
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    with pytest.warns(UserWarning, match="dual_chunk_attention_config is not applied.* up to 262144 tokens"):
        assert models.read_config(plain | {"dual_chunk_attention_config": chunks}) == models.read_config(plain)
    with pytest.raises(ValueError, match="dual_chunk_attention_config=7: must be an object"):
        models.read_config(plain | {"dual_chunk_attention_config": 7})


def test_config_lists_every_attribute_it_does_not_know():
    bad = CONFIGS["llama2"] | {"num_experts": 8, "logit_cap": 30.0, "unset": None, "hidden_act": "gelu"}
    del bad["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size is missing") as error:
        models.read_config(bad)
    assert all(
        part in str(error.value)
        for part in ("num_experts=8", "logit_cap=30.0", "hidden_act='gelu'", "'silu'")
    )
    assert "unset" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"missing \['factor'\]"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, r"unknown \['beta'\]"),
        ({"num_key_value_heads": 3}, "q_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"hidden_size": "48"}, "hidden_size='48' is not an integer in 1..2147483647"),
    ],
)
def test_config_refuses_values_it_cannot_honour(change, message):
    with pytest.raises(ValueError, match=message):
        models.read_config(CONFIGS["llama2"] | {"head_dim": 12} | change)


def test_linear_scaling_stretches_the_context_and_condense_ratio_is_linear_scaling():
    config = models.read_config(CONFIGS["longchat"])
    assert config.context == 128
    old = {key: value for key, value in CONFIGS["longchat"].items() if key != "rope_scaling"}
    assert models.read_config(old | {"rope_condense_ratio": 4}) == config
