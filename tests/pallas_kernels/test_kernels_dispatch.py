"""Who runs an op, what falls back to XLA, and what XLA makes of it on a CPU."""

import contextlib
import dataclasses
import functools
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, check, lanes, make

from lowrank_kv_jax.attention.partial import AttnPartial, merge
from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.pallas_kernels import dispatch, gpu_shared_memory
from lowrank_kv_jax.pallas_kernels.coefficient_attention import coefficient_attention
from lowrank_kv_jax.pallas_kernels.gpu_grid import Grid
from lowrank_kv_jax.pallas_kernels.gpu_launch import by_head
from lowrank_kv_jax.pallas_kernels.packing import EMPTY, Stored, columns, merge_splits
from lowrank_kv_jax.pallas_kernels.rotary_coefficient_attention import reference, rotary_coefficient_attention, tiles
from lowrank_kv_jax.storage import block_reads
from lowrank_kv_jax.storage.basis import expand_values, fold_query
from lowrank_kv_jax.storage.block_reads import BLOCK
from lowrank_kv_jax.storage.cached_tokens import CachedTokens
from lowrank_kv_jax.storage.over_tokens import over_mesh
from lowrank_kv_jax.storage.positions import Runs
from lowrank_kv_jax.storage.tokens_last import tokens_last_of


def run(op, *args, **options):
    """One program: operation by operation, each of a hundred would be compiled."""
    return jax.jit(functools.partial(op, **options))(*args)


def test_the_platform_decides_the_environment_overrides_and_an_argument_overrides_both(monkeypatch):
    assert dispatch.choose() == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dispatch.choose() == "triton" and not dispatch.interpreted("triton") and dispatch.interpreted("tpu")
    monkeypatch.setenv("LOWRANK_KV_BACKEND", "tpu")
    assert dispatch.choose() == "tpu" and dispatch.choose("xla") == "xla"
    with pytest.raises(ValueError, match="backend='cuda'.*xla, triton, mosaic_gpu, tpu"):
        dispatch.choose("cuda")


def test_an_unsupported_case_runs_on_xla_with_one_warning_that_says_why():
    x = make(Case(T=40, lengths=(60, 3), S=64, N=4, poison=False))  # 80 query rows a kv head
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match="coefficient_attention runs on XLA instead of triton: more than 64 query rows"):
        part = run(coefficient_attention, x.q, x.tokens, **x.options, backend="triton")
    check(part, x.oracle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(coefficient_attention, x.q, x.tokens, **x.options, backend="triton")
    with pytest.warns(RuntimeWarning, match="tpu: keys lie as .tokens, rank.*with_token_layout"):
        run(coefficient_attention, x.q, x.tokens, **x.options, backend="tpu")


@pytest.mark.parametrize("backend", ["triton", "tpu"])
def test_tokens_in_no_order_are_not_read_through_a_mask_nor_by_owner(backend):
    x = make(Case(rope=RopeSpec(10000.0, 64), own=1, J=1, Jv=1, lengths=(60,), S=64, poison=False))
    where = x.tokens.positions
    packed = x.tokens._replace(positions=dataclasses.replace(where, owner=jnp.zeros((1, 1, 64), jnp.int8)))
    masked = x.options | {"causal": True}
    for tokens, options, reason in (x.tokens, masked, "windowed attention over PerHead"), (packed, x.options, "packed in one buffer"):
        dispatch.warn_anew()
        tokens = lanes(tokens) if backend == "tpu" else tokens
        with pytest.warns(RuntimeWarning, match=reason):
            run(rotary_coefficient_attention, x.q, tokens, x.basis, **options, backend=backend)


@pytest.mark.parametrize("case", [
    Case(bits=8, rank_k=8192, rank_v=8192, J=1, Jv=1, lengths=(1,), S=128, poison=False),
    Case(bits=8, rank_k=2048, rank_v=2048, J=1, Jv=1, lengths=(1,), S=128, poison=False, rope=RopeSpec(10000.0, 64)),
], ids=["after", "before"])
def test_what_a_tpu_cannot_hold_is_refused_before_its_compiler_refuses_it(case):
    """Tiles in 8 bits have 2,048 tokens at the least, which overflow the memory of v5e."""
    x = make(case)
    dispatch.warn_anew()
    op = functools.partial(rotary_coefficient_attention, key_basis=x.basis) if case.rope else coefficient_attention
    with pytest.warns(RuntimeWarning, match="instead of tpu: keys of .* bytes of a TPU's fast memory"):
        part = run(op, x.q, lanes(x.tokens), **x.options, backend="tpu")
    np.testing.assert_allclose(part.lse, x.oracle[1], rtol=1e-4)


def test_keys_before_rope_are_rebuilt_by_a_gpu_whose_tensor_cores_read_shared_memory(monkeypatch):
    x = make(Case(rope=RopeSpec(10000.0, 64), runs=(((8, 8),), ((4, 8),)), lengths=(60,), S=64, dtype="bfloat16"))
    monkeypatch.setattr(gpu_shared_memory, "capability", lambda: "8.0")
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match="XLA instead of triton: keys .* compute capability 8.0"):
        part = run(rotary_coefficient_attention, x.q, x.tokens, x.basis, **x.options, backend="triton")
    np.testing.assert_allclose(part.lse, x.oracle[1], rtol=1e-2)


def test_keys_before_rope_that_xla_rebuilds_faster_are_xlas_on_a_gpu(monkeypatch):
    """Which is said only where the kernel was asked for."""
    x = make(Case(rope=RopeSpec(10000.0, 64), rank_k=257, lengths=(60,), S=64, poison=False))
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match="XLA instead of triton: keys of 257 components before RoPE, not in 16 bits"):
        part = run(rotary_coefficient_attention, x.q, x.tokens, x.basis, **x.options, backend="triton")
    check(part, x.oracle)
    dispatch.warn_anew()
    monkeypatch.setattr("lowrank_kv_jax.storage.backend.platform", lambda: "gpu")
    check(run(rotary_coefficient_attention, x.q, x.tokens, x.basis, **x.options), x.oracle)


@pytest.mark.parametrize("runs, most", [((((8, 9), (4, 21), (2, 12)), ((4, 42),)), 4e-3), (None, 2e-6)], ids=["packed", "bfloat16"])
def test_a_cpu_rebuilds_keys_in_16_bits_where_that_loses_nothing_to_speak_of(monkeypatch, runs, most):
    """What is stored in bfloat16 is multiplied as it is; of packed codes it is the basis that is rounded."""
    x = make(Case(rope=RopeSpec(10000.0, 64), runs=runs, dtype="bfloat16", J=1, Jv=1, lengths=(300,), mean=True, poison=False))
    tokens, q, basis = x.tokens, x.q.astype(jnp.float32), x.basis.astype(jnp.bfloat16)
    if runs is not None:
        columns = (dataclasses.replace(side, codes=tokens_last_of(side.codes)) for side in (tokens.keys, tokens.values))
        tokens, basis = tokens._replace(keys=next(columns), values=next(columns)), 1.001 * x.basis.astype(jnp.float32)

    def found(able):
        for module in (reference, tiles):
            monkeypatch.setattr(module, "multiplies_16_bits", lambda: able)
        return np.asarray(run(rotary_coefficient_attention, q, tokens, basis, **x.options, backend="xla").out)

    error = np.linalg.norm(found(True) - found(False)) / np.linalg.norm(found(False))
    assert error < most and (runs is None or error > 1e-5)


def test_xla_rebuilds_the_keys_of_a_device_s_own_heads_there():
    """Of coefficients that all heads share; left to itself its compiler rebuilds all of them on each device."""
    x = make(Case(rope=RopeSpec(10000.0, 64), J=1, Jv=1, K=4, N=8, lengths=(60,), S=64, poison=False))

    def rebuilt():
        attend = functools.partial(rotary_coefficient_attention, **x.options, backend="xla")
        program = str(jax.make_jaxpr(attend)(x.q, x.tokens, x.basis))
        return {int(channels) for channels in re.findall(r"f32\[(\d+),64\] = dot_general", program)}

    assert rebuilt() == {4 * 64}
    with over_mesh(jax.sharding.AbstractMesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert rebuilt() == {64}


@pytest.mark.parametrize("case, reason", [
    (Case(runs=(((8, 3), (2, 12)), ((4, 11),)), lengths=(60,), S=64, dtype="bfloat16"), "keys packed in 6 bytes a token, no whole words"),
    (Case(runs=(((8, 2), (2, 13)), ((4, 16),)), lengths=(60,), S=64), "queries of dtype float32"),
    (Case(runs=(((8, 4),), ((4, 8),)), lengths=(60,), S=64, T=17, causal=True, dtype="bfloat16"), "more than 16 query rows"),
    (Case(runs=(((8, 8),), ((1, 8992),)), J=1, Jv=1, lengths=(60,), S=64, dtype="bfloat16"), "registers overflow"),
], ids=["words", "float32", "rows", "wide"])
def test_packed_tokens_that_no_kernel_of_a_gpu_covers_are_xlas(case, reason):
    x = make(case)
    dispatch.warn_anew()
    with pytest.warns(RuntimeWarning, match=f"XLA instead of triton: .*{reason}"):
        check(run(coefficient_attention, x.q, x.tokens, **x.options, backend="triton"), x.oracle, case.dtype)


@pytest.mark.parametrize("case", [
    Case(S=1300, lengths=(0, 1, 1300, 513), poison=False),
    Case(S=1100, bits=8, lengths=(0, 129, 1100), rank_k=64, poison=False),
    Case(S=2500, J=1, Jv=1, rank_k=48, per_row=True, rope=RopeSpec(10000.0, 64), lengths=(0, 2500), poison=False),
], ids=str)
def test_on_an_accelerator_xla_attends_to_all_slots_at_once(monkeypatch, case):
    """Of a few queries: without a loop that ends where the tokens do. A CPU has one, and so has a chunk of a prompt."""
    x = make(case)
    op = functools.partial(coefficient_attention, backend="xla")
    if case.per_row:
        op = functools.partial(rotary_coefficient_attention, key_basis=x.basis, backend="xla")

    def loops(q, positions):
        options = x.options | {"q_positions": positions}
        return str(jax.make_jaxpr(functools.partial(op, **options))(q, x.tokens)).count("while[")

    many = [jnp.repeat(a, 17, axis=1) for a in (x.q, x.options["q_positions"])]
    assert loops(x.q, x.options["q_positions"]) == 1
    monkeypatch.setattr(block_reads, "platform", lambda: "gpu")
    assert loops(x.q, x.options["q_positions"]) == 0 and loops(*many) == 1
    check(jax.jit(functools.partial(op, **x.options))(x.q, x.tokens), x.oracle)
    for bound in ("AT_ONCE", "A_TURN"):
        monkeypatch.setattr(block_reads, bound, 1300)
    assert loops(x.q, x.options["q_positions"]) == 1


@pytest.mark.parametrize("heads, told", [(8, False), (9, True), (16, True), (17, False)])
def test_bytes_that_pallas_would_count_in_32_signed_bits_are_xlas(heads, told):
    codes = jax.ShapeDtypeStruct((4, heads, 2**20, 64), jnp.uint8)
    packed = types.SimpleNamespace(q=jax.ShapeDtypeStruct((4, heads, 16, 64), jnp.bfloat16), rows=4)
    with pytest.raises(dispatch.Unsupported, match="in 32 bits") if told else contextlib.nullcontext():
        by_head(packed, codes, None, jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16))


def test_packed_codes_have_fewer_stages_where_shared_memory_is_small(monkeypatch):
    grid, stored = Grid(16, 64, 33, 3, 4), Stored(jax.ShapeDtypeStruct((1, 1, 64, 152), jnp.uint8), None)
    assert gpu_shared_memory.packed_grid_there(grid, stored, stored, 448, 30720) == grid
    monkeypatch.setattr(gpu_shared_memory, "there", lambda: gpu_shared_memory.OTHERS)
    assert gpu_shared_memory.packed_grid_there(grid, stored, stored, 528).stages == 2
    with pytest.raises(dispatch.Unsupported, match="bytes of shared memory, the GPU has 101376"):
        gpu_shared_memory.packed_grid_there(grid, stored, stored, 448, 30720)


def test_columns_cover_a_width_once():
    assert columns(96) == ((0, 64), (64, 32)) and columns(256) == ((0, 128), (128, 128))
    assert columns(608)[-2:] == ((512, 64), (576, 64))  # beyond the width
    for width in range(1, 700):
        pieces = columns(width)
        ends = [start + size for start, size in pieces]
        assert [start for start, _ in pieces] == [0, *ends[:-1]] and ends[-1] >= width > pieces[-1][0]
        assert all(size >= 32 and size & (size - 1) == 0 for _, size in pieces)


def test_splits_merge_as_parts_do():
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=(2, 3, 4, 5, 6)), rng.normal(size=(2, 3, 4, 5))
    out[:, :, 1], lse[:, :, 1] = 0, EMPTY
    out[0, 0], lse[0, 0] = 0, EMPTY  # nothing at all
    found = merge_splits(jnp.asarray(out, jnp.float32), jnp.asarray(lse.swapaxes(2, 3), jnp.float32))
    with np.errstate(invalid="ignore"):
        parts = [AttnPartial(jnp.asarray(out[:, :, i]), jnp.where(lse[:, :, i] <= EMPTY, -jnp.inf, lse[:, :, i]))
                 for i in range(4)]
    expected = merge(parts)
    np.testing.assert_allclose(found.out, expected.out, atol=1e-6)
    np.testing.assert_allclose(found.lse[1], expected.lse[1], atol=1e-6)
    assert np.all(np.asarray(found.lse[0, 0]) <= EMPTY / 2)


def test_runs_know_their_pieces():
    rng = np.random.default_rng(1)
    start, jump = rng.integers(-3, 20, (50, 2)), rng.integers(0, 6, (50, 2))
    start[:10, 1] = start[:10, 0]
    runs = Runs(jnp.asarray(start, jnp.int32), jnp.asarray(jump, jnp.int32))
    slots, wanted = np.arange(30), np.arange(25)
    positions = np.asarray(runs.at(jnp.asarray(slots)))
    through = runs.slots_through(jnp.asarray(np.tile(wanted, (50, 1)), jnp.int32))
    np.testing.assert_array_equal(through, (positions[:, None] <= wanted[:, None]).sum(-1))
    first, offset = (np.asarray(x) for x in runs.pieces())
    piece = (slots[None, :, None] >= first[:, None]).sum(-1) - 1
    np.testing.assert_array_equal(slots + np.take_along_axis(offset, piece, axis=1), positions)


S, K, N, D, R = 4096, 4, 8, 160, 40  # widths that nothing else in the program has


def decode_shapes(attend):
    """Shapes of all arrays in the optimised program of a decoded token's attention, and what it needs beside them."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    gaps = jnp.zeros((1, 2), jnp.int32)

    def decode(q, k, v, basis, length):
        tokens = CachedTokens(k, v, length, Runs(gaps, gaps))
        return attend(q, tokens, basis, scale=D**-0.5, q_positions=length[:, None], causal=False, window=None)

    stored, basis = shape((1, K, S, R)), shape((K, D, R))
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = jax.jit(decode).lower(shape((1, 1, N, D)), stored, stored, basis, length).compile()
    found = re.findall(r"[a-z]\w*\[([\d,]+)\]", compiled.as_text())
    return [tuple(map(int, dims.split(","))) for dims in found], compiled.memory_analysis().temp_size_in_bytes


def holds_tokens_by_channels(dims):
    return D in dims and any(n in dims for n in (S, BLOCK)) or int(np.prod(dims)) >= S * D and R not in dims


def test_post_rope_decode_has_no_array_of_tokens_by_head_channels():
    def in_coefficient_space(q, tokens, basis, **options):
        part = coefficient_attention(fold_query(basis, q, K), tokens, **options)
        return expand_values(basis, part.out, K), part.lse

    shapes, temporaries = decode_shapes(in_coefficient_space)
    assert (1, K, S, R) in shapes
    assert not [dims for dims in shapes if holds_tokens_by_channels(dims)]
    assert temporaries < 4 * S * D / 2  # nor all of a buffer in another layout
    rebuilt, _ = decode_shapes(functools.partial(rotary_coefficient_attention, rope=None, kv_heads=K))
    assert [dims for dims in rebuilt if holds_tokens_by_channels(dims)]  # the check would see one
