"""Attention of a prompt with itself as accelerators run it, traced and interpreted on a CPU."""

import functools
import itertools
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import softmax_attention
from jax.extend.core import jaxprs_in_params

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.generation.forward import layer_prefill
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.parameters import param_table
from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention, causal_partial
from lowrank_kv_jax.storage.over_tokens import over_mesh

HERE = Path(__file__).parent
TOKENS = 4096  # more squared than any activation of the model below has numbers
N, K, D, SCALE = 4, 2, 8, 0.35


numbers = itertools.count()


def config(window, context):
    return ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, intermediate_size=128, num_layers=1, q_heads=4, kv_heads=2,
        head_dim=64, norm_eps=1e-5, rope=RopeSpec(10000.0, 64), context=context, windows=(window,),
    )


def traced(window, tokens=TOKENS):
    """The program of a layer's prefill, as the platform of the moment would have it."""
    shape, model = jax.ShapeDtypeStruct, config(window, TOKENS + next(numbers))  # traced anew: for another platform, perhaps
    weights = jax.tree.map(lambda info: shape(info.shape, jnp.bfloat16), param_table(model)["layers"][0])
    return jax.make_jaxpr(functools.partial(layer_prefill, model, window))(
        weights, shape((1, tokens, 64), jnp.bfloat16), shape((1, tokens), jnp.int32)
    )


def equations(jaxpr):
    """All equations, those of loops, calls and kernels included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_no_platform_holds_a_number_for_every_pair_of_tokens(platform, window, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    dispatch.warn_anew()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = traced(window)
    found = list(equations(program.jaxpr))
    largest = max(math.prod(x.aval.shape) for e in found for x in e.outvars if hasattr(x.aval, "shape"))
    assert TOKENS < largest < TOKENS**2
    assert any(e.primitive.name == "pallas_call" for e in found) == (platform == "tpu")
    # cuDNN is not here
    assert [str(x.message).startswith("causal_attention runs on XLA instead of triton: ") for x in said] == (
        [True] if platform == "gpu" else [])


def test_a_program_for_a_device_that_is_not_there_takes_its_branch():
    there = jax.sharding.AbstractDevice("TPU v5e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=there)):
        assert dispatch.choose() == "tpu" and not dispatch.interpreted("tpu") and dispatch.interpreted("triton")
        assert any(e.primitive.name == "pallas_call" for e in equations(traced(None).jaxpr))
    assert dispatch.choose() == "xla"


def test_the_program_of_a_longer_prompt_is_no_longer():
    lengths = [sum(1 for _ in equations(traced(None, tokens).jaxpr)) for tokens in (1024, 4096)]
    assert lengths[0] == lengths[1]


def case(size, window):
    """Queries, keys and values in 16 bits, and what float64 makes of them, with its log-sum-exp."""
    rng, rows = np.random.default_rng(size), 2 if size < 1000 else 1  # interpreted: every row takes its time
    q = rng.normal(size=(rows, size, N, D))
    k, v = (rng.normal(size=(rows, size, K, D)) for _ in range(2))
    given = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    i = np.arange(size)
    mask = i[None, :] <= i[:, None]
    if window is not None:
        mask &= i[None, :] > i[:, None] - window
    exact = (np.asarray(x, np.float32) for x in given)
    return given, *softmax_attention(*exact, np.broadcast_to(mask, (rows, size, size)), SCALE)


@pytest.mark.parametrize("size, window, sinks", [
    (1100, None, None),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1100, 5, None), (513, None, None), (1100, 600, None))),
    pytest.param(600, 300, (2.0, -1.0, 4.0, 0.5), marks=pytest.mark.newest),
])
def test_splash_attention_against_float64(size, window, sinks):
    given, oracle, lse = case(size, window)
    if sinks is not None:
        sinks = np.array(sinks, np.float32)
        oracle = oracle * np.exp(lse - np.logaddexp(lse, sinks))[..., None]
    found = jax.jit(functools.partial(causal_attention, scale=SCALE, window=window, backend="tpu"))(*given, sinks)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), oracle, atol=0.03)


ON_A_MESH = """
import functools, warnings
import jax, numpy as np
from test_prefill_attention import SCALE, case
from lowrank_kv_jax.pallas_kernels.causal_attention import causal_attention, causal_partial
from lowrank_kv_jax.storage.over_tokens import over_mesh
from lowrank_kv_jax.storage.sharding import make_mesh, shard_rows
mesh, (given, oracle, lse) = make_mesh("data=2,model=2"), case(600, None)
given = jax.device_put(given, jax.NamedSharding(mesh, jax.P("data", None, "model")))

@jax.jit
def both(*given):
    with over_mesh(mesh):
        rule = {"scale": SCALE, "window": None, "backend": "tpu"}
        return causal_attention(*given, np.zeros(4, np.float32), **rule), causal_partial(*given, **rule)

with warnings.catch_warnings():
    warnings.simplefilter("error")  # nothing falls back
    found, part = both(*given)
np.testing.assert_allclose(part.out, oracle, atol=0.03)
np.testing.assert_allclose(part.lse, lse, atol=0.02)
shown = np.asarray(found, np.float32)
np.testing.assert_allclose(shown, oracle * np.exp(lse - np.logaddexp(lse, 0))[..., None], atol=0.03)
assert found.sharding.spec[::2] == ("data", "model")
assert "all-gather" not in both.lower(*given).compile().as_text()
"""


@pytest.mark.slow
def test_splash_attention_on_a_mesh_against_float64():
    """Each device reads its own rows and heads, with sink logits of these."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64",
                        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.newest
@pytest.mark.parametrize("backend, size, window", [
    pytest.param("tpu", 600, None, marks=pytest.mark.slow), ("tpu", 600, 300), ("triton", 600, None)])
def test_a_chunk_on_an_accelerator_against_float64(backend, size, window):
    given, oracle, lse = case(size, window)
    dispatch.warn_anew()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back
        found = jax.jit(functools.partial(causal_partial, scale=SCALE, window=window, backend=backend))(*given)
    assert found.out.dtype == found.lse.dtype == jnp.float32
    np.testing.assert_allclose(found.out, oracle, atol=0.03)
    np.testing.assert_allclose(found.lse, lse, atol=0.02 if backend == "tpu" else 1e-4)  # queries carry the scale


@pytest.mark.parametrize("backend, reason", [("tpu", "bfloat16"), ("triton", "cuDNN takes a GPU")])
def test_what_a_kernel_does_not_cover_is_the_loop_over_blocks(backend, reason):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 600, heads, D)), jnp.float32) for heads in (N, K, K))
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match=f"causal_attention runs on XLA instead of {backend}: .*{reason}"):
        found = causal_attention(q, k, v, scale=SCALE, window=None, backend=backend)
    np.testing.assert_array_equal(found, causal_attention(q, k, v, scale=SCALE, window=None, backend="xla"))


@pytest.mark.parametrize("window, dtype, dim, reason", [
    (5, "bfloat16", D, "no sliding window"), (None, "float32", D, "are float32"), (None, "bfloat16", 4, "values of 4"),
])
def test_what_triton_does_not_cover_of_a_chunk_is_the_loop_over_blocks(window, dtype, dim, reason):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 600, *shape)), dtype) for shape in ((N, D), (K, D), (K, dim)))
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match=f"causal_partial runs on XLA instead of triton: .*{reason}"):
        found = causal_partial(q, k, v, scale=SCALE, window=window, backend="triton")
    np.testing.assert_array_equal(found.out, causal_partial(q, k, v, scale=SCALE, window=window, backend="xla").out)


def partial_of(heads, dim):
    """The program for a chunk of 600 tokens as a GPU has it."""
    q, k, v = (jax.ShapeDtypeStruct((1, 600, n, dim), jnp.bfloat16) for n in heads)
    return jax.make_jaxpr(functools.partial(causal_partial, scale=SCALE, window=None, backend="triton"))(q, k, v).jaxpr


@pytest.mark.parametrize("dim, kernels", [(256, True), (512, False), (576, False)])
def test_heads_too_wide_for_shared_memory_are_told_before_a_compiler_meets_them(dim, kernels):
    dispatch.warn_anew()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = partial_of((4, 1, 1), dim)
    assert any(e.primitive.name == "pallas_call" for e in equations(program)) == kernels
    assert [f"heads of {dim} channels need" in str(x.message) for x in said] == [True] * (not kernels)


def test_each_device_reads_a_chunk_for_its_own_heads():
    with over_mesh(jax.sharding.AbstractMesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        (kernel,) = (e for e in equations(partial_of((8, 4, 4), D)) if e.primitive.name == "pallas_call")
    assert {x.aval.shape[-2] for x in kernel.invars} == {2}
