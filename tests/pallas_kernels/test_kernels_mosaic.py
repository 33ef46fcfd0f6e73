"""The Mosaic GPU kernel, interpreted on a CPU with its races detected, against float64; jax >= 0.11 has the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, check, make, slow

from lowrank_kv_jax.pallas_kernels import dispatch
from lowrank_kv_jax.pallas_kernels.coefficient_attention import api, coefficient_attention

OLD = jax.version.__version_info__ < (0, 11)
pytestmark = pytest.mark.newest
needs_interpreter = pytest.mark.skipif(OLD, reason=f"jax {jax.__version__} has no interpreter for Mosaic GPU, 0.11 has")


def run(op, *args, **options):
    return jax.jit(functools.partial(op, backend="mosaic_gpu", **options))(*args)


@needs_interpreter
@pytest.mark.filterwarnings("error::RuntimeWarning")  # no XLA instead
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="bfloat16", lengths=(0, 1, 63, 64, 65, 127, 128, 129, 300)),
        Case(rank_k=96, rank_v=16, dtype="bfloat16", S=256, lengths=(255, 256)),
        Case(rank_k=48, rank_v=128, dtype="float16", lengths=(300, 2), J=1),
        Case(T=3, causal=True, window=70, lengths=(1, 2, 3, 100, 101, 300), dtype="float16"),
        Case(S=1300, lengths=(1300, 513, 0), N=8, dtype="bfloat16"),  # several splits, of which some are empty
        slow(Case(rank_k=128, rank_v=256, J=2, Jv=1, lengths=(130,), dtype="bfloat16")),
        slow(Case(T=2, causal=True, gaps=(200, 7), jumps=(9, 2), lengths=(8, 199, 202), dtype="float16")),
        *(slow(Case(rank_k=r, rank_v=r, lengths=(256, 257), dtype="bfloat16")) for r in (16, 64, 96, 128)),
    ],
    ids=str,
)
def test_coefficients(case):
    x = make(case)
    check(run(coefficient_attention, x.q, x.tokens, **x.options), x.oracle, case.dtype)


@needs_interpreter
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_that_share_tokens_see_ranges_of_their_own():
    """As chunks do: more rows than the tokens have, each from a slot in the middle of a tile to another."""
    from lowrank_kv_jax.pallas_kernels.coefficient_attention import gpu_mosaic

    x = make(Case(dtype="bfloat16", lengths=(300, 200)))
    begin, end = (jnp.asarray(slots, jnp.int32)[:, None] for slots in ([0, 70, 10, 200], [70, 300, 10, 200]))
    q = jnp.repeat(x.q, 2, axis=0)
    part = gpu_mosaic.attend_slots(q, x.tokens, begin, end, scale=0.3, size=300, interpret=True)
    np.testing.assert_array_equal(np.isneginf(part.lse).all((1, 2)), [False, False, True, True])
    both = jnp.logaddexp(part.lse[0], part.lse[1])
    np.testing.assert_allclose(both, x.oracle[1][0], atol=3e-2)


@pytest.mark.parametrize("case, reason", [
    (Case(bits=8), "keys of dtype int8"),
    (Case(), "keys of dtype float32 under queries of dtype float32"),
    (Case(rank_v=24, dtype="bfloat16"), "values of width 24, allowed are multiples of 16 up to 256"),
    (Case(rank_k=272, dtype="bfloat16"), "keys of width 272"),
    (Case(rank_k=256, rank_v=256, dtype="bfloat16"), "do not fit into shared memory"),
], ids=str)
def test_what_it_does_not_cover_runs_on_xla_with_the_reason(case, reason):
    x = make(Case(**{**case.__dict__, "poison": False, "lengths": (5, 0)}))
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match="jax >= 0.11" if OLD else reason):
        part = run(coefficient_attention, x.q, x.tokens, **x.options)
    check(part, x.oracle, case.dtype)


@pytest.mark.skipif(OLD, reason="refused for its jax first")
def test_other_gpus_than_hopper_are_refused(monkeypatch):
    class Ampere:
        compute_capability = "8.0"

    x = make(Case(dtype="bfloat16"))
    monkeypatch.setattr(jax, "devices", lambda: [Ampere()])
    with pytest.raises(dispatch.Unsupported, match=r"capability 8.0, the kernel is for 9.0 \(Hopper\)"):
        api._by_kernel("gpu_mosaic", q=x.q, tokens=x.tokens, **x.options)
