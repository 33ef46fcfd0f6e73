"""Cross-layer SVD: the fit, groups and ranks, 8-bit storage, bytes, recompression."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, bases_for, compress, model, prompts, run

from lowrank_kv_jax import methods
from lowrank_kv_jax.codecs.layer_groups import read_table, split_rank, stride_groups
from lowrank_kv_jax.estimators.linalg import orthonormalise
from lowrank_kv_jax.estimators.subspace_iteration import leading_subspace, wide_gram
from lowrank_kv_jax.generation.forward import make_layout, prefill
from lowrank_kv_jax.method.accounting import cache_bytes
from lowrank_kv_jax.methods import machine_of
from lowrank_kv_jax.methods.parse import parse_method, spell_method
from lowrank_kv_jax.saving.saved_cache import abstract_cache
from lowrank_kv_jax.storage.quantised import quantise, read_basis, read_tokens, store_basis, store_tokens

DEEP = dataclasses.replace(PLAIN, num_layers=5, windows=(None,) * 5)
FOUR = dataclasses.replace(PLAIN, num_layers=4, windows=(None,) * 4)

subspace = jax.jit(leading_subspace, static_argnames="rank")


def test_the_papers_preset_has_its_ranks():
    """Of Llama-3.1-8B: 512 and 768 columns of 4 layers of 8 heads of 128."""
    llama = dataclasses.replace(FOUR, q_heads=32, kv_heads=8, head_dim=128)
    (group,) = parse_method("xkv:paper").default_bases(llama.attention)
    assert parse_method("xkv:paper,rank=0.5") == methods.XKV(group=4, rank=0.5, sinks=0, recent=0)
    assert parse_method("xkv:paper,smaller=4") == methods.XKV(group=4, smaller=4.0, sinks=0, recent=0)
    assert group.layers == 4 and tuple(group.ranks) == (512, 768)


# ---- the fit -----------------------------------------------------------------------------------------------


def spectrum(kind: str, size: int) -> np.ndarray:
    i = np.arange(1, size + 1)
    return {
        "powers": 1 / i,
        "fast": 1 / i**2.5,
        "flat": np.ones(size),
        "geometric": 0.95**i,
        "step": np.where(i <= 40, 1.0, 1e-2),
        "outlier": np.where(i == 1, 1e3, 1 / i),
    }[kind]


def tokens_with(singular: np.ndarray, width: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rank = min(width, rows, len(singular))
    u, v = (np.linalg.qr(rng.normal(size=(n, rank)))[0] for n in (rows, width))
    return (u * singular[:rank]) @ v.T


@pytest.mark.parametrize("rank", [16, 150])
@pytest.mark.parametrize("kind", ["powers", "fast", "flat", "geometric", "step", "outlier"])
def test_the_fit_is_within_a_percent_of_the_best_there_is(kind, rank):
    x = tokens_with(spectrum(kind, 320), 320, 500)
    moment = jnp.asarray(x.T @ x, jnp.float32)
    basis = subspace(moment, rank)
    assert basis.dtype == jnp.float32
    u = np.asarray(basis, np.float64)
    np.testing.assert_allclose(u.T @ u, np.eye(rank), atol=1e-5)
    lost, energy = np.sum((x - x @ u @ u.T) ** 2), np.sum(x**2)
    best = np.sum(spectrum(kind, 320)[rank:] ** 2)
    assert lost <= 1.01 * best + 1e-6 * energy


@pytest.mark.parametrize("behind", [0.7, 0.8, 0.9])
def test_the_fit_is_within_four_percent_where_what_is_left_out_is_as_large(behind):
    values = np.where(np.arange(320) < 128, 1.0, behind)
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(320, 320)))[0]
    u = np.asarray(subspace(jnp.asarray((q * values) @ q.T, jnp.float32), 128), np.float64)
    assert values.sum() - np.sum((q.T @ u) ** 2 * values[:, None]) <= 1.04 * values[128:].sum()


@pytest.mark.parametrize("width", [6, 7])
def test_the_moment_of_wide_tokens(width):
    x = np.random.default_rng(0).normal(size=(2, 9, 1, width)).astype(np.float32)
    np.testing.assert_allclose(wide_gram(x), np.einsum("bsjv,bsjw->bjvw", x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_prompts_shorter_than_the_rank(rows):
    x = tokens_with(np.ones(320), 320, rows) if rows else np.zeros((1, 320))
    u = np.asarray(subspace(jnp.asarray(x.T @ x, jnp.float32), 64), np.float64)
    np.testing.assert_allclose(u.T @ u, np.eye(64), atol=1e-5)
    np.testing.assert_allclose(x @ u @ u.T, x, atol=1e-3)


def test_the_fit_takes_leading_axes():
    moments = np.stack(
        [x.T @ x for x in (tokens_with(spectrum(k, 320), 320, 400) for k in ("powers", "fast"))]
    )
    both = subspace(jnp.asarray(moments, jnp.float32), 16)
    alone = subspace(jnp.asarray(moments[0], jnp.float32), 16)
    np.testing.assert_allclose(both[0] @ both[0].T, alone @ alone.T, atol=1e-3)


def test_cholesky_orthonormalises_nested_spans():
    x = np.random.default_rng(0).normal(size=(60, 8)) * 10.0 ** -np.arange(8)
    q = orthonormalise(jnp.asarray(x, jnp.float32))
    expected, factor = np.linalg.qr(x)
    np.testing.assert_allclose(q, expected * np.sign(np.diagonal(factor)), atol=1e-5)


# ---- groups and ranks --------------------------------------------------------------------------------------


def test_stride_groups_leave_a_smaller_last_one():
    assert stride_groups(5, 2) == ((0, 1), (2, 3), (4,))
    assert stride_groups(6, 2, first=3) == ((0,), (1,), (2,), (3, 4), (5,))


def test_ranks_are_split_one_to_one_and_a_half():
    assert split_rank(120, 1000, 1.5) == (96, 144)
    assert split_rank(1000, 1000, 1.5) == (1000, 1000)  # full is full
    assert split_rank(900, 1000, 1.5) == (800, 1000)
    assert split_rank(1, 1000, 1.5) == (1, 1)
    assert split_rank(48, 192, 1.5) == (38, 58) and split_rank(48, 192, 1.5, 8) == (40, 56)
    assert split_rank(100, 100, 1.5, 8) == (100, 100) and split_rank(8, 100, 1.5, 8) == (8, 8)
    assert split_rank(3, 100, 1.5, 8) == (2, 4)  # too few to round
    assert split_rank(64, 64, 0.5, 8) == (64, 64) and split_rank(56, 64, 0.5, 8) == (64, 48)  # what keys leave is the values'


def test_ranks_follow_the_fields():
    spec = DEEP.attention
    width = spec.kv_heads * spec.head_dim
    ranks = [group.ranks for group in methods.XKV(group=2, rank=0.5).default_bases(spec)]
    multiples = [1 if width < 64 else 8 for width in (2 * width, width)]
    assert ranks == [split_rank(width, 2 * width, 1.5, multiples[0])] * 2 + [split_rank(width // 2, width, 1.5, multiples[1])]
    given = [group.ranks for group in methods.XKV(group=2, rank=9).default_bases(spec)]
    assert given == [split_rank(9, 2 * width, 1.5)] * 3  # an int is kept: only its ratio is rounded
    table = parse_method("xkv:group=2,table=3:4/5:6/7:8").default_bases(spec)
    assert [group.ranks for group in table] == [(3, 4), (5, 6), (7, 8)]
    (first, *_) = methods.XKV(group=2, rank_k=6, rank_v=0.5).default_bases(spec)
    assert first.ranks == (6, width)
    assert (
        len(methods.XKV().layer_groups(spec)) == 2 and len(methods.XKV().layer_groups(PLAIN.attention)) == 1
    )


@pytest.mark.parametrize(
    "spec, message",
    [
        ("xkv:group=6", "group=6: the model has 5 layers"),
        ("xkv:rank=1000", "rank=1000: must lie in 1..128"),
        ("xkv:rank_k=4,rank_v=1000", "rank_v=1000: must lie in 1..128"),
        ("xkv:table=3:4", "has 1 entries, this model has 2 groups"),
        ("xkv:table=3-4/2", "expected a pair"),
    ],
)
def test_configurations_that_a_model_does_not_suit(spec, message):
    method = parse_method(spec)
    with pytest.raises(ValueError, match=message):
        method.validate(DEEP.attention)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("xkv:group=0", "group=0"),
        ("xkv:rank=0", "rank=0"),
        ("xkv:rank=1.5", "rank=1.5"),
        ("xkv:rank_k=3", "give both"),
        ("xkv:rank=none", "rank=None: give rank, or rank_k and rank_v, or table, or smaller"),
        ("xkv:rank=0.5,smaller=4", "rank=0.5, smaller=4.0: give exactly one of them"),
        ("xkv:rank_k=8,rank_v=8,table=8:8", "rank_k=8, table='8:8': give exactly one of them"),
        ("xkv:bits=9", "bits=9"),
        ("xkv:basis_dtype=int3", "basis_dtype='int3'"),
        ("xkv:sinks=-1", "sinks=-1"),
        ("xkv:recompress=0", "recompress=0"),
        ("xkv:smaller=0.0", "smaller=0.0"),
        ("xkv:ratio=0.0", "ratio=0.0"),
        ("xkv:rebuild=0", "rebuild=0"),
        ("xkv:rebuild_block=0", "rebuild_block=0"),
        ("xkv:rebuild=64,recompress=8", "give one of the two"),
    ],
)
def test_bad_fields_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)


def test_layers_of_different_shape_are_refused():
    method, layout = methods.XKV(group=2, sinks=0, recent=0), make_layout(DEEP, 1, 8, 16)
    (bases, *_) = method.default_bases(DEEP.attention)
    _, _, taps = _taps(8)
    wide = taps._replace(k_pre=jnp.zeros((1, 8, 4, 12)))
    with pytest.raises(ValueError, match="must have one shape"):
        machine_of(method).compress(layout, bases, machine_of(method).init(layout, bases), (taps, wide), jnp.array([8]))


def _taps(size):
    from lowrank_kv_jax.attention.spec import Taps

    x = jnp.ones((1, size, 4, 8))
    return x, size, Taps(x, x, x, x, x)


def test_read_table_names_what_it_was_given():
    with pytest.raises(ValueError, match="table='1:2:3'"):
        read_table("1:2:3", 1)


# ---- against the single layer, and exactness ---------------------------------------------------------------


@functools.cache
def logits_of(method, ragged=None):
    lengths = None if ragged is None else jnp.array(ragged, jnp.int32)
    return run(method, FOUR, prompts(length=PROMPT + 56), PROMPT, width=8, lengths=lengths)


@pytest.mark.slow
def test_one_layer_is_the_single_svd():
    """The same ranks, the same exact tokens: the same logits."""
    _, cross = logits_of(methods.XKV(group=1, rank_k=8, rank_v=8, sinks=4, recent=8))
    _, single = logits_of(methods.SingleSVD(rank=8, sinks=4, recent=8))
    np.testing.assert_allclose(cross, single, atol=2e-4)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param("group=2,sinks=0,recent=0", marks=pytest.mark.slow),
        "group=3,recompress=8,sinks=4,recent=4,centred=true",
        pytest.param("group=2,recompress=20,refit=false,sinks=0,recent=0", marks=pytest.mark.slow),
        pytest.param("smaller=0.2,sinks=4,recent=8,rebuild=1.0,rebuild_block=16", marks=pytest.mark.slow),
    ],
)
def test_full_rank_is_exact(fields):
    _, exact = logits_of(methods.Full())
    _, logits = logits_of(parse_method(f"xkv:rank=1.0,{fields}"))
    np.testing.assert_allclose(logits, exact, atol=1e-4)


def test_wider_groups_of_correlated_layers_keep_more():
    """Layers that share their tokens' coefficients are one layer's rank: G layers at rank R lose nothing."""
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(1, 64, 12))
    taps = []
    for _ in range(4):
        k, v = (
            jnp.asarray(shared @ rng.normal(size=(12, 32)), jnp.float32).reshape(1, 64, 4, 8) for _ in "kv"
        )
        taps.append(_taps(64)[2]._replace(k=k, k_pre=k, v=v))
    layout, lengths = (
        make_layout(dataclasses.replace(PLAIN, num_layers=4, windows=(None,) * 4), 1, 64, 80),
        jnp.array([64]),
    )
    method = methods.XKV(group=4, rank_k=12, rank_v=12, sinks=0, recent=0)
    bases = method.default_bases(layout.spec)[0]
    layout = dataclasses.replace(layout, dtype="float32")
    state = machine_of(method).compress(layout, bases, machine_of(method).init(layout, bases), tuple(taps), lengths)
    rebuilt = jnp.einsum("bjsr,bjwr->bsw", state.store.tokens.k, state.store.k_basis)
    np.testing.assert_allclose(
        rebuilt, np.concatenate([t.k_pre.reshape(1, 64, -1) for t in taps], -1), atol=1e-3
    )


@pytest.mark.parametrize("spec", [pytest.param("xkv:group=2,rank_k=16,rank_v=16", marks=pytest.mark.slow), "single-svd:rank=16"])
def test_a_bias_costs_a_centred_cache_nothing(spec):
    """Keys of Qwen2 have one that is many times their spread; in 8 bits it sets the step, too."""
    rng, errors = np.random.default_rng(0), {}
    x = rng.normal(size=(1, 64, 4, 8)) @ np.diag([1.0] * 4 + [1e-3] * 4) + rng.normal(size=(4, 8)) * 40
    q, _, tap = _taps(64)
    taps = tap._replace(k_pre=jnp.asarray(x, jnp.float32), v=jnp.asarray(x[:, ::-1], jnp.float32))
    for centred in (False, True):
        method = parse_method(f"{spec},sinks=0,recent=0,bits=8,centred={centred}")
        layout = make_layout(FOUR, 1, 64, 80, dtype=jnp.float32)
        (group, *_), machine = method.default_bases(layout.spec) or (None,), machine_of(method)
        layers = len(machine.layer_groups(layout.spec)[0])
        state = compress(machine, layout, group, (taps,) * layers, jnp.array([64]))
        tokens = state.store.tokens
        k, v = (read_tokens(getattr(tokens, side)) for side in "kv")
        keys, values = machine.codec.decode(
            dataclasses.replace(layout, spec=dataclasses.replace(layout.spec, rope=None)), group, state.store, k, v,
            tokens.positions, 0)
        errors[centred] = [np.abs(a[:, :, :64] - b.swapaxes(1, 2)).mean() for a, b in ((keys, taps.k_pre), (values, taps.v))]
    assert errors[True][0] < 0.25 * errors[False][0] and errors[True][1] == errors[False][1], errors


# ---- storage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_codes_err_by_half_a_step(scale):
    x = scale * np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    codes, scales = quantise(jnp.asarray(x), axis=1)
    assert codes.dtype == jnp.int8 and scales.dtype == jnp.bfloat16 and scales.shape == (3, 1)
    step = np.asarray(scales, np.float32)
    assert (np.abs(np.asarray(codes, np.float32) * step - x) <= 0.501 * step).all()
    assert (step <= 1.02 * np.abs(x).max(1, keepdims=True) / 127).all()


def test_storage_keeps_zeros_and_reads_blocks():
    x = np.random.default_rng(0).normal(size=(2, 1, 300, 6)).astype(np.float32) * 10.0 ** -np.arange(6)
    x[:, :, 200:] = 0
    stored = store_tokens(jnp.asarray(x), 8, jnp.float32)
    wide = np.asarray(read_tokens(stored))
    np.testing.assert_array_equal(wide[:, :, 200:], 0)
    np.testing.assert_allclose(wide, x, atol=0, rtol=0.03 * 100)
    relative = np.sum((wide - x) ** 2, axis=(0, 1, 2)) / np.sum(x**2, axis=(0, 1, 2))
    assert (relative < 2e-4).all()  # of every component, whatever its size
    np.testing.assert_array_equal(stored.read_block(100, 150), wide[:, :, 100:250])


@pytest.mark.parametrize(
    "dtype, error",
    [("float32", 0), ("bfloat16", 1e-5), ("float16", 1e-6), ("int8", 2e-4), ("float8_e4m3fn", 2e-3)],
)
def test_basis_storage(dtype, error):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(1, 1, 96, 20)))[0]
    stored = store_basis(jnp.asarray(basis, jnp.float32), dtype)
    wide = read_basis(stored)
    assert np.sum((wide - basis) ** 2) / np.sum(basis**2) <= error + 1e-12
    np.testing.assert_array_equal(read_basis(stored, 24, 24), wide[:, :, 24:48])


@pytest.mark.parametrize(
    "fields, error", [pytest.param("bits=8,basis_dtype=int8", 0.1, marks=pytest.mark.slow), pytest.param("basis_dtype=float8_e4m3fn", 0.5, marks=pytest.mark.slow)]
)
def test_eight_bits_stay_close_and_are_counted(fields, error):
    plain, logits = logits_of(methods.XKV(group=2, rank=0.5, sinks=4, recent=8))
    cache, coarse = logits_of(parse_method(f"xkv:group=2,rank=0.5,sinks=4,recent=8,{fields}"))
    assert 0 < np.abs(coarse - logits).max() < error
    bytes_of = cache_bytes(cache).by_kind
    assert bytes_of["scales"] > 0
    before = cache_bytes(plain).by_kind
    for kind, field in (("coefficients", "bits"), ("bases", "basis_dtype")):
        assert bytes_of[kind] == before[kind] // (4 if field in fields else 1)


# ---- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ["", ",bits=8", ",bits=8,basis_dtype=int8", ",group=2"])
@pytest.mark.parametrize("smaller", [1.5, 3.0])
def test_smaller_counts_all_bytes(fields, smaller):
    method = parse_method(f"xkv:smaller={smaller},sinks=2,recent=2{fields}")
    reached = cache_bytes(abstract_cache(method, make_layout(DEEP, 2, 256, 272, BLOCK))).smaller
    assert smaller <= reached < 1.12 * smaller  # ranks are whole numbers


def test_room_for_new_tokens_does_not_take_the_prompt_s_bytes():
    method = methods.XKV(smaller=2.0, sinks=2, recent=2, group=5)
    (group,) = method.default_bases(DEEP.attention)
    tight, roomy = (make_layout(DEEP, 1, 256, capacity, BLOCK) for capacity in (272, 500))

    def ranks(method, layout):
        store = jax.eval_shape(lambda: machine_of(method).init(layout, group)).store
        return store.k_basis.shape[-1], store.v_basis.shape[-1]

    assert ranks(method, tight) == ranks(method, roomy)
    held = dataclasses.replace(method, recompress=16)
    assert ranks(held, tight) != ranks(held, roomy)


def test_a_prompt_too_short_for_its_ratio_is_said_to_be():
    method = methods.XKV(smaller=8.0)
    with pytest.raises(ValueError, match="smaller=8.0: a prompt of 96 tokens .* is too short"):
        prefill(method, PLAIN, model().params, prompts(), capacity=CAPACITY)


@pytest.mark.slow
def test_prefill_holds_the_exact_keys_and_values_of_one_group():
    """Temporary memory of a jitted prefill does not grow with the number of layers."""
    method, temporary = methods.XKV(group=2, rank=0.25, sinks=4, recent=4), {}
    for layers in (4, 8):
        config = dataclasses.replace(PLAIN, num_layers=layers, windows=(None,) * layers)
        shapes = jax.eval_shape(lambda config=config: model.__wrapped__(config).params)

        def whole(params, tokens, config=config):
            return prefill(method, config, params, tokens, dtype=jnp.float32)

        compiled = jax.jit(whole).lower(shapes, jax.ShapeDtypeStruct((4, 256), jnp.int32)).compile()
        temporary[layers] = compiled.memory_analysis().temp_size_in_bytes
    layer = 4 * 256 * 2 * PLAIN.kv_heads * PLAIN.head_dim * 4
    assert temporary[8] - temporary[4] < layer + 1024  # of four more layers; and their positions


# ---- recompression -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [pytest.param("refit=false", marks=pytest.mark.slow), "refit=true,bits=8"])
def test_generated_tokens_are_coded_after_a_while(fields):
    method = parse_method(f"xkv:group=2,rank=0.5,sinks=4,recent=4,recompress=16,{fields}")
    lengths = jnp.array([PROMPT, 50], jnp.int32)
    cache, logits = logits_of(method, (PROMPT, 50))
    assert np.isfinite(logits).all()
    coded = cache.groups[0].store.tokens.length
    assert (coded > lengths - 8).all() and (cache.groups[0].ends[0].length <= 8 + 16 + BLOCK).all()
    assert (coded + cache.groups[0].ends[0].length == cache.length).all()


@pytest.mark.slow
def test_refitting_follows_new_tokens_better_than_projecting():
    """After a generation of another kind of text, the refitted basis keeps more of it."""
    errors = {}
    for refit in (True, False):
        method = methods.XKV(group=2, rank=0.25, sinks=0, recent=0, recompress=16, refit=refit)
        tokens = jnp.concatenate([prompts(length=48, vocab=4), prompts(length=80, seed=3)], axis=1)
        _, exact = run(methods.Full(), FOUR, tokens, 48, width=8)
        _, logits = run(method, FOUR, tokens, 48, width=8)
        errors[refit] = np.mean((logits - exact) ** 2)
    assert errors[True] < errors[False]


@pytest.mark.slow
def test_recompression_of_a_ragged_row_is_that_of_the_row_alone():
    method = methods.XKV(group=2, rank=0.5, sinks=4, recent=4, recompress=16)
    tokens, length = prompts(length=PROMPT + 56), 61
    _, together = run(method, FOUR, tokens, PROMPT, lengths=jnp.array([PROMPT, length]), width=8)
    alone = jnp.concatenate([tokens[1:, :length], tokens[1:, PROMPT:]], axis=1)
    _, alone = run(method, FOUR, alone, length, capacity=length + CAPACITY - PROMPT, width=8)
    np.testing.assert_allclose(together[1], alone[0], atol=5e-4)


@pytest.mark.slow
def test_everything_selected_is_exact_and_a_summary_of_nothing_adds_nothing():
    _, exact = logits_of(methods.Full())
    spec = "xkv:group=3,rank=1.0,sinks=2,recent=4+snapkv:keep=1.0,decoding=keep,recent=8+moments"
    _, logits = logits_of(parse_method(spec))
    np.testing.assert_allclose(logits, exact, atol=1e-4)


@pytest.mark.slow
def test_int8_coefficients_of_selected_tokens_with_moments_of_the_rest():
    """The stages of one composition: what is held, what it weighs, and that the summary brings attention back."""
    spec = "xkv:group=2,rank=0.5,sinks=4,recent=8,bits=8,basis_dtype=int8+snapkv:keep=0.5,decoding=keep,recent=8"
    cache, without = logits_of(parse_method(spec), (PROMPT, 60))
    kept = cache.groups[0].store
    assert kept.tokens.k.shape[2] == 48 - 12 and kept.tokens.length.tolist() == [36, 36]
    positions = np.asarray(kept.tokens.positions.position)
    assert (np.diff(positions) > 0).all() and positions.min() >= 4
    assert positions[0].max() < PROMPT - 8 and positions[1].max() < 60 - 8
    bytes_of = cache_bytes(cache).by_kind
    assert bytes_of["coefficients"] == 2 * 2 * 36 * (kept.tokens.k.shape[3] + kept.tokens.v.shape[3])
    full, exact = logits_of(methods.Full(), (PROMPT, 60))
    cache, logits = logits_of(parse_method(spec + "+moments"), (PROMPT, 60))
    dropped = cache.groups[1].gone[0]
    np.testing.assert_array_equal(dropped.count, [[PROMPT - 12 - 36] * 4, [60 - 12 - 36] * 4])
    keys = np.asarray(full.groups[2].ends[0].k, np.float64)[1, :, 4:52]  # exact keys of the third layer's middle
    gone = np.setdiff1d(np.arange(4, 52), np.asarray(cache.groups[1].store.tokens.positions.position)[1]) - 4
    np.testing.assert_allclose(dropped.k_mean[1], keys[:, gone].mean(1), atol=1e-4)
    assert np.mean((logits - exact) ** 2) < np.mean((without - exact) ** 2)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("xkv:recompress=8+snapkv:keep=0.5,decoding=keep", "recompress cannot"),
        ("xkv:rebuild=8+snapkv:keep=0.5,decoding=keep", "pages are made of"),
        ("xkv+moments", "nothing is evicted"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(spec)


def test_a_composition_is_spelled_as_it_is_read():
    text = "xkv:group=2,bits=8+snapkv:keep=0.5,decoding=keep+moments"
    assert spell_method(parse_method(text)) == text


def test_bases_are_markers_without_arrays():
    assert jax.tree.leaves(bases_for(methods.XKV(group=2), DEEP)) == []
