"""StreamingKV: the rule against float64, what it learns, who reads older latents, and what happens when it breaks."""

import dataclasses
import functools
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters
from helpers import BLOCK, CAPACITY, PLAIN, PROMPT, WINDOWED, bases_for, model, prompts, run

from lowrank_kv_jax.calibration.calibrate import collect_moments, iterate_taps
from lowrank_kv_jax.calibration.corpus import load_corpus
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.estimators.gha import gha_update
from lowrank_kv_jax.estimators.gha_tail import update_tail
from lowrank_kv_jax.evals.needle.long import long_needles
from lowrank_kv_jax.evals.studies.bases.piecewise_stream import follow_stream, piecewise_stream
from lowrank_kv_jax.evals.studies.streaming.paired_gain import paired_gain
from lowrank_kv_jax.evals.studies.streaming.quality import ENDS as QUALITY_ENDS
from lowrank_kv_jax.evals.studies.streaming.quality import Score, ablation_specs, needle_gains, quality_specs, text_gains
from lowrank_kv_jax.evals.studies.streaming.reconstruction import hidden_updates, means, reconstruction
from lowrank_kv_jax.evals.studies.streaming.shifted_texts import CALIBRATE, MIXED, text_of, windows_of
from lowrank_kv_jax.generation.forward import extend, prefill, refresh
from lowrank_kv_jax.generation.generate import generate
from lowrank_kv_jax.method import Fault
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.saving.saved_bases import load_bases, save_bases

ENDS = "sinks=4,recent=8"
OPTIONS = dict(capacity=CAPACITY, block=BLOCK, dtype=jnp.float32)


# ---- the rule ---------------------------------------------------------------------------------------


def oracle(a, x, weight, eta, tail, iterations, triangle, scale, frozen):
    """Token by token, float64: dA = eta sum_t w_t [x_t h_t^T - A corner(h_t h_t^T)], the last columns alone."""
    a, corner = a.astype(np.float64), {"sanger": np.triu, "printed": np.tril, "full": np.array}[triangle]
    p = a.shape[1] - tail
    h = x @ a
    for step in range(iterations):
        h = x @ a if not (frozen and step) else h
        inner = sum(w * np.outer(y, y) for w, y in zip(weight, h, strict=True))
        image = sum(w * np.outer(token, y) for w, token, y in zip(weight, x, h, strict=True))
        move = image - a @ corner(inner)
        by = {"sum": 1.0, "mean": weight.sum(), "bound": np.abs(inner[p:, p:]).sum(1).max()}[scale]
        a = np.concatenate([a[:, :p], a[:, p:] + eta * move[:, p:] / by], axis=1)
    return a[:, p:]


@pytest.mark.parametrize("tokens", [7, 40], ids=["fewer tokens than channels", "more"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_update_is_the_rule_in_float64(tokens, frozen):
    rng = np.random.default_rng(0)
    start = np.linalg.qr(rng.normal(size=(12, 6)))[0]
    x, weight = rng.normal(size=(tokens, 12)) * np.linspace(2, 0.3, 12), rng.integers(0, 3, tokens).astype(float)
    for triangle, (scale, eta), tail in itertools.product(
        ("sanger", "printed", "full"), (("sum", 1e-3), ("mean", 0.05), ("bound", 0.5)), (2, 6)
    ):
        settings = dict(iterations=3, triangle=triangle, scale=scale)
        found = update_tail(
            *(jnp.asarray(part, jnp.float32) for part in (start[:, : 6 - tail], start[:, 6 - tail :], x, weight)), eta,
            frozen_outputs=frozen, **settings)
        expected = oracle(start, x, weight, eta, tail, frozen=frozen, **settings)
        np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=f"{triangle} {scale} {tail}")


def test_moving_the_tail_is_the_whole_rule_with_the_other_columns_at_rest():
    rng = np.random.default_rng(1)
    start = jnp.asarray(np.linalg.qr(rng.normal(size=(2, 12, 6)))[0], jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 30, 12)), jnp.float32)
    whole = gha_update(start, x, None, 1e-3, tail=2, iterations=3, scale="sum")
    tail = update_tail(start[..., :4], start[..., 4:], x, None, 1e-3, iterations=3, scale="sum")
    np.testing.assert_array_equal(whole[..., :4], start[..., :4])
    np.testing.assert_allclose(whole[..., 4:], tail, atol=1e-6)


def test_it_recovers_the_eigenvectors_of_a_known_covariance_in_order():
    """Algorithm 1's orientation; equation 15 as printed finds the same span in reverse."""
    rng = np.random.default_rng(2)
    vectors = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    values = np.r_[16.0, 8.0, 4.0, 2.0, np.full(12, 0.1)]
    root = jnp.asarray(vectors * np.sqrt(values), jnp.float32)
    x = root.T  # sixteen tokens whose second moment is the covariance itself
    start = jnp.asarray(np.linalg.qr(rng.normal(size=(16, 4)))[0], jnp.float32)
    learn = functools.partial(update_tail, start[:, :0], start, x, None, 0.5, iterations=600)
    found = np.abs(vectors[:, :4].T @ np.asarray(learn()))
    np.testing.assert_allclose(found, np.eye(4), atol=0.02)
    reverse = np.abs(vectors[:, :4].T @ np.asarray(learn(triangle="printed")))
    np.testing.assert_allclose(reverse, np.eye(4)[:, ::-1], atol=0.02)


def test_the_stream_of_the_paper_orders_the_three_baselines():
    """Appendix A.6: d = 40, r = 6, batches of 64, 60 steps a segment, eta 2e-3, reset every 5 steps."""
    for seed in range(2):
        errors = follow_stream(piecewise_stream(segments=3, steps=60, seed=seed))
        static, prefill_only, both = (x.reshape(3, 60)[1:].mean() for x in errors)
        assert static > prefill_only + 0.1 and prefill_only > both + 0.05
    ideal = 1 - np.linspace(6, 3, 6).sum() / (np.linspace(6, 3, 6).sum() + 34)
    assert both < ideal + 0.02  # of the best basis there is


def test_a_step_that_is_too_long_gives_nan_and_never_a_wrong_basis():
    rng = np.random.default_rng(3)
    start = jnp.asarray(np.linalg.qr(rng.normal(size=(12, 4)))[0], jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 30, 12)), jnp.float32) * jnp.array([1.0, 0.01])[:, None, None]
    found = update_tail(start[:, :2], jnp.broadcast_to(start[:, 2:], (2, 12, 2)), x, None, 1.0, iterations=5, scale="sum")
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()  # a row of its own
    assert np.isfinite(update_tail(start[:, :2], start[:, 2:], x[0], None, 1.0, iterations=50)).all()


# ---- what is learned --------------------------------------------------------------------------------


def compressed(spec, config=PLAIN, tokens=None, bases=None):
    method = parse_method(spec)
    tokens = prompts() if tokens is None else tokens
    bases = bases_for(method, config) if bases is None else bases
    cache, logits = prefill(method, config, model(config).params, tokens, bases=bases, **OPTIONS)
    return method, bases, cache, logits


def lost(method, bases, cache, config, tokens, layer=0):
    """Energy of the prompt's values that the latents of a layer lose."""
    taps = list(itertools.islice(iterate_taps(config, model(config).params, tokens), layer + 1))[-1]
    own, state = bases[layer], cache.groups[layer]
    frame = method.frame(config.attention, own, state.store)
    _, code = frame.code(taps.k_pre, taps.v)
    close = frame.rebuild("v", code, config.kv_heads).swapaxes(1, 2)
    return float(jnp.sum((taps.v - close) ** 2))


@pytest.mark.slow
def test_the_coupled_form_learns_the_prompt_and_the_printed_one_does_not_lose_it():
    tokens, losses = prompts(), {}
    for spec in ("eta=0", "alpha=0.2", "alpha=0.5", "alpha=1.0", "form=encoder,scale=sum,eta=1e-6",
                 "form=encoder,eta=1.0"):
        method, bases, cache, _ = compressed(f"streamingkv:{spec},{ENDS}")
        losses[spec] = lost(method, bases, cache, PLAIN, tokens)
    static = losses["eta=0"]
    assert losses["alpha=1.0"] < losses["alpha=0.5"] < losses["alpha=0.2"] < 0.97 * static
    np.testing.assert_allclose(losses["form=encoder,scale=sum,eta=1e-6"], static, rtol=1e-3)  # nearly no step at all
    assert losses["form=encoder,eta=1.0"] > 1.02 * static  # what it gains lies outside of the decoder's span


@pytest.mark.parametrize("update", ["group", pytest.param("joint", marks=pytest.mark.slow)])
def test_groups_update_alone_or_jointly(update):
    method, bases, cache, _ = compressed(f"streamingkv:head_group=2,update={update},alpha=0.5,{ENDS}")
    state = cache.groups[0]
    joint = update == "joint"
    assert state.store.k_basis.shape == ((2, 1, 32, 8) if joint else (2, 2, 16, 4))  # p = 4 of 8 columns in each of two groups
    assert state.store.tokens.k.shape[1::2] == ((1, 16) if joint else (2, 8))
    still = dataclasses.replace(method, eta=0.0, eta_dec=0.0)
    _, _, rest, _ = compressed(f"streamingkv:head_group=2,update={update},alpha=0.5,eta=0,eta_dec=0,{ENDS}")
    palu = parse_method(f"palu:head_group=2,{ENDS}")
    _, logits = run(still, PLAIN, prompts(length=PROMPT + 4), PROMPT)
    _, expected = run(palu, PLAIN, prompts(length=PROMPT + 4), PROMPT)
    np.testing.assert_allclose(logits, expected, atol=1e-4)  # without a step it is Palu
    if joint:  # columns of one group may read the heads of the other
        between = np.asarray(state.store.v_basis)[:, 0, 16:, :4]
        assert np.abs(np.asarray(rest.groups[0].store.v_basis)[:, 0, 16:, :4]).max() == 0 < np.abs(between).max()


def test_only_the_tail_of_a_row_is_state():
    _, bases, cache, _ = compressed(f"streamingkv:alpha=0.25,{ENDS}")
    assert bases[0].k.shape == (1, 32, 16) and cache.groups[0].store.k_basis.shape == (2, 1, 32, 4)
    tails = np.asarray(cache.groups[0].store.v_basis)
    assert np.abs(tails[0] - tails[1]).max() > 0.01  # each row has learned its own prompt


@pytest.mark.parametrize("learn_from", ["interval", pytest.param("token", marks=pytest.mark.slow)])
def test_updates_while_decoding_fall_on_every_sth_token(learn_from):
    """A refresh against the rule by hand: positions of whole intervals, in order, before the tokens are coded."""
    spec = f"streamingkv:form=encoder,eta=0,eta_dec=0.5,iterations_dec=2,step=5,learn_from={learn_from},sinks=4,recent=0"
    tokens = prompts(length=PROMPT + BLOCK)
    method, bases, cache, _ = compressed(spec, tokens=tokens[:, :PROMPT])
    before = np.asarray(cache.groups[0].store.v_basis)
    cache = refresh(method, cache, bases=bases)
    np.testing.assert_array_equal(cache.groups[0].store.v_basis, before)  # nothing left the window
    cache, _ = extend(method, PLAIN, model().params, cache, tokens[:, PROMPT:], bases=bases)
    state = jax.tree.map(np.asarray, cache.groups[0])
    x = np.asarray(state.ends[0].v[:, :, 4 : 4 + BLOCK], np.float64).swapaxes(1, 2).reshape(2, BLOCK, 32)
    tail, lead = np.asarray(state.store.v_basis, np.float64)[:, 0], np.asarray(bases[0].v, np.float64)[0, :, :-3]
    positions = PROMPT + np.arange(BLOCK)
    for interval in range(PROMPT // 5, (PROMPT + BLOCK - 1) // 5 + 1):
        own = positions // 5 == interval
        own &= positions % 5 == 0 if learn_from == "token" else own
        if own.any():
            tail = np.stack([
                oracle(np.c_[lead, tail[row]], x[row, own], np.ones(own.sum()), 0.5, 3, 2, "sanger", "bound", False)
                for row in range(2)])
    cache = refresh(method, cache, bases=bases)
    np.testing.assert_allclose(cache.groups[0].store.v_basis[:, 0], tail, atol=1e-5)


# ---- who reads older latents ------------------------------------------------------------------------


def rebuilt_prompt(spec, steps=1):
    """Values of the prompt's latents as read before and after refreshes that moved the columns; how far these moved."""
    tokens = prompts(length=PROMPT + steps * BLOCK, seed=4)
    method, bases, cache, _ = compressed(spec, tokens=tokens[:, :PROMPT])
    first = cache.groups[0]
    count = int(first.store.tokens.length[0])
    before = method.rebuilt(cache.layout, bases[0], first.store)[1][:, :, :count]
    start = np.asarray(first.store.v_basis)
    for step in range(steps):
        cache, _ = extend(method, PLAIN, model().params, cache, tokens[:, PROMPT + step * BLOCK :][:, :BLOCK], bases=bases)
        cache = refresh(method, cache, bases=bases)
    after = method.rebuilt(cache.layout, bases[0], cache.groups[0].store)[1][:, :, :count]
    return np.asarray(before), np.asarray(after), np.abs(np.asarray(cache.groups[0].store.v_basis) - start).max()


@pytest.mark.slow
def test_older_latents_are_transported_or_read_by_the_decoder_that_never_moved():
    common = f"eta=0.5,eta_dec=1.0,iterations_dec=5,alpha=0.5,{ENDS}"
    before, after, moved = rebuilt_prompt(f"streamingkv:form=encoder,{common}")
    assert moved > 0.05
    np.testing.assert_array_equal(before, after)
    energy = np.sum(before**2)
    before, after, moved = rebuilt_prompt(f"streamingkv:{common}")
    transported = np.sum((before - after) ** 2) / energy
    before, after, _ = rebuilt_prompt(f"streamingkv:transport=false,{common}")
    assert moved > 0.05 and transported < 0.5 * np.sum((before - after) ** 2) / energy
    # at full rank nothing is lost by it
    before, after, moved = rebuilt_prompt(f"streamingkv:rank=1.0,{common}")
    assert moved > 0.05
    np.testing.assert_allclose(before, after, atol=1e-5)


@pytest.mark.slow
def test_quantised_latents_are_transported_too():
    common = f"eta=0.5,eta_dec=1.0,alpha=0.5,{ENDS}"
    plain, coarse = (rebuilt_prompt(f"streamingkv:{common},bits={bits}")[1] for bits in ("none", 8))
    assert np.sum((plain - coarse) ** 2) < 1e-3 * np.sum(plain**2)


# ---- between prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["coupled", pytest.param("encoder", marks=pytest.mark.slow)])
def test_a_prompt_starts_anew_unless_what_was_learned_is_carried_over(form, tmp_path):
    spec = f"streamingkv:form={form},alpha=0.5,{ENDS}"
    method, bases, cache, _ = compressed(spec, tokens=prompts(seed=1))
    carried = method.carried(cache, bases, row=1)
    still = dataclasses.replace(method, eta=0.0)
    for start, expected in ((bases, None), (carried, cache)):
        fresh, _ = prefill(still, PLAIN, model().params, prompts(seed=2), bases=start, **OPTIONS)
        for layer, state in enumerate(fresh.groups):
            first = bases[layer].v[..., -8:] if expected is None else expected.groups[layer].store.v_basis[1]
            np.testing.assert_array_equal(state.store.v_basis[0], first)
            read = method.frame(PLAIN.attention, start[layer], state.store).v
            assert np.abs(np.asarray(read) - np.asarray(bases[layer].v)).max() > 0.01 or expected is None or form == "encoder"
    _, _, again, _ = compressed(spec, tokens=prompts(seed=2))
    _, _, onwards, _ = compressed(spec, tokens=prompts(seed=2), bases=carried)
    assert np.abs(np.asarray(again.groups[0].store.v_basis) - np.asarray(onwards.groups[0].store.v_basis)).max() > 1e-3
    owner = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    save_bases(tmp_path / "learned", carried, owner, method)
    for ours, theirs in zip(jax.tree.leaves(load_bases(tmp_path / "learned", owner, method)), jax.tree.leaves(carried),
                            strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="row=2 of a cache"):
        method.carried(cache, bases, row=2)


@pytest.mark.parametrize("form", [pytest.param("encoder", marks=pytest.mark.slow), "coupled"])
def test_what_all_groups_learned_together_starts_the_next_prompt(form, tmp_path):
    """`paper` learns so: its columns read the heads of every group, its bases are those of each group."""
    spec = f"streamingkv:form={form},head_group=2,update=joint,alpha=0.5,{ENDS}"
    method, bases, cache, _ = compressed(spec, tokens=prompts(seed=1))
    learned = cache.groups[0].store
    carried = method.carried(cache, bases, row=1)
    assert carried[0].k.shape == (2, 16, 8) and carried[0].k_tail.shape == (1, 32, 8)
    still, tokens = dataclasses.replace(method, eta=0.0), prompts(seed=2)
    fresh, _ = prefill(still, PLAIN, model().params, tokens, bases=carried, **OPTIONS)
    store = fresh.groups[0].store
    before, now = (method.frame(PLAIN.attention, *pair) for pair in ((bases[0], learned), (carried[0], store)))
    for old, new in zip(before, now, strict=True):
        if old is not None:
            np.testing.assert_array_equal(new[-1], old[-1])  # of the row that learned; means are of all rows
    taps = next(iter(iterate_taps(PLAIN, model().params, tokens)))
    row = jax.tree.map(lambda u: u[1:] if u.ndim == 4 else u, before)
    count = int(store.tokens.length[0])
    for stored, expected in zip((store.tokens.k, store.tokens.v), row.code(taps.k_pre, taps.v), strict=True):
        np.testing.assert_allclose(stored[:, :, :count], expected[:, :, 4 : 4 + count], atol=1e-5)
    owner = types.SimpleNamespace(name="tiny", config=PLAIN, fingerprint="f" * 64)
    save_bases(tmp_path / "learned", carried, owner, method)
    jax.tree.map(np.testing.assert_array_equal, load_bases(tmp_path / "learned", owner, method), carried)


def test_carried_columns_serve_the_fields_that_learned_them():
    method = parse_method("streamingkv:head_group=2,update=joint,alpha=0.5")
    own = bases_for(method)[0]
    carried = own._replace(k_tail=jnp.zeros((1, 32, 8)), v_tail=jnp.zeros((1, 32, 8)))
    assert all(tail.shape == (1, 32, 8) for tail in method.first_tails(carried))
    for other, takes in (({"update": "group"}, "(2, 16, 4)"), ({"alpha": 0.25}, "(1, 32, 4)")):
        refused = dataclasses.replace(method, **other)
        with pytest.raises(ValueError, match=rf"k_tail has the shape \(1, 32, 8\): must be {re.escape(takes)} for update="):
            refused.first_tails(carried)


@pytest.mark.slow
def test_a_turn_of_the_same_conversation_goes_on_learning():
    method = parse_method(f"streamingkv:{ENDS}")
    bases = bases_for(method)
    first = generate(model(), method, [list(range(40))], bases=bases, max_new_tokens=4, capacity=120, dtype=jnp.float32)
    second = generate(model(), method, [list(range(20, 60))], bases=bases, cache=first, max_new_tokens=4)
    assert np.abs(np.asarray(first.cache.groups[0].store.v_basis) - np.asarray(second.cache.groups[0].store.v_basis)).max() > 1e-3


# ---- when it breaks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, when", [
    pytest.param("eta=1.0,eta_dec=0", "at prefill", marks=pytest.mark.slow), ("eta=0,eta_dec=10.0", "by decode step 16"),
])
def test_divergence_is_reported_with_layer_and_step_and_generation_stops(spec, when):
    """Blocks from before stay good; nothing is generated from a broken projection."""
    method = parse_method(f"streamingkv:scale=sum,iterations_dec=5,{spec},sinks=4,recent=0")
    got = []
    with pytest.raises(Fault, match=rf"streamingkv: the update diverged in layer 0 of row 0 \(eta=.*lower eta.*{when}"):
        generate(model(), method, [list(range(40))], bases=bases_for(method), max_new_tokens=80, stop_at_eos=False,
                 block=16, dtype=jnp.float32, on_tokens=got.append)
    assert sum(x.shape[1] for x in got) == (0 if "prefill" in when else 1)
    assert issubclass(Fault, ValueError)  # told in one line by the command line


def test_nan_logits_follow_for_who_writes_a_loop_of_his_own():
    method, bases, cache, _ = compressed(f"streamingkv:scale=sum,eta=1.0,{ENDS}")
    _, logits = extend(method, PLAIN, model().params, cache, prompts()[:, :1], bases=bases)
    assert np.isnan(logits).all()


# ---- settings ---------------------------------------------------------------------------------------

TABLE_5 = [
    ("longbench-llama-2-7b-30", 0.7, 3, 1e-6, 0.2), ("longbench-llama-2-7b-50", 0.5, 3, 1e-5, 0.1),
    ("longbench-longchat-7b-v1.5-30", 0.7, 3, 1e-6, 0.05), ("longbench-longchat-7b-v1.5-50", 0.5, 3, 1e-5, 0.1),
    ("longbench-mistral-7b-instruct-v0.2-30", 0.7, 3, 5e-6, 0.1), ("longbench-mistral-7b-instruct-v0.2-50", 0.5, 2, 5e-6, 0.2),
    ("ruler-llama-2-7b-50", 0.5, 3, 1e-6, 0.2), ("ruler-mistral-7b-instruct-v0.2-50", 0.5, 3, 1e-5, 0.1),
]


def test_presets_are_the_rows_of_table_5():
    assert set(REGISTRY["streamingkv"].presets) == {name for name, *_ in TABLE_5} | {"paper"}
    for name, rank, iterations, eta, alpha in TABLE_5:
        method = parse_method(f"streamingkv:{name}")
        assert (method.rank, method.iterations, method.eta, method.alpha, method.step) == (rank, iterations, eta, alpha, 10)
        assert (method.form, method.scale, method.frozen_outputs, method.update) == ("encoder", "sum", True, "joint")
        assert (method.iterations_dec, method.eta_dec, method.sinks, method.recent) == (iterations, eta, 0, 0)
    assert parse_method("streamingkv:paper") == parse_method("streamingkv:longbench-mistral-7b-instruct-v0.2-50")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("alpha=0.0", r"alpha=0.0: must lie in \(0, 1\]"),
        ("alpha=1.5", r"alpha=1.5: must lie in \(0, 1\]"),
        ("eta=-1.0", "eta=-1.0: must be a finite number of at least 0"),
        ("eta_dec=nan", "eta_dec=nan: must be a finite number"),
        ("step=0", "step=0: must be an int of at least 1"),
        ("form=decoder", "form='decoder': allowed are coupled, encoder"),
        ("triangle=lower", "triangle='lower': allowed are sanger, printed, full"),
        ("scale=big", "scale='big': allowed are bound, mean, sum"),
        ("hadamard=true", "hadamard=True: a Hadamard turn mixes all columns"),
        ("head_group=3", "head_group=3: must divide the model's 4 kv heads"),
    ],
)
def test_bad_input_is_told_with_what_is_allowed(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_method(f"streamingkv:{spec}").validate(PLAIN.attention)


@pytest.mark.slow
def test_full_rank_is_exact_where_all_columns_move_and_groups_are_joined():
    tokens = prompts(length=PROMPT + 24)
    _, exact = run(parse_method("full"), WINDOWED, tokens, PROMPT, width=8)
    method = parse_method(f"streamingkv:rank=1.0,head_group=2,update=joint,alpha=1.0,step=3,{ENDS}")
    _, logits = run(method, WINDOWED, tokens, PROMPT, width=8)
    np.testing.assert_allclose(logits, exact, atol=1e-4)


# ---- the study --------------------------------------------------------------------------------------


def scored(spec, better, smaller, points=0.0):
    """Two tasks of three windows, six needles."""
    nll = {"prose": [2.0, 2.5, 3.0], "code": [1.0, 1.5, 2.0]}
    return spec, Score(spec, {}, {task: [x - better for x in own] for task, own in nll.items()},
                       {"single": [50.0 + points] * 2, "multi": [0.0] * 4}, {}, smaller)


def test_a_method_is_compared_with_palu_at_its_ranks_and_at_its_bytes():
    for spec in (*quality_specs(0.7, 192), *quality_specs(0.5, 192), *ablation_specs(0.5)):
        parse_method(spec)
    assert quality_specs(0.5, 192)[-1] == f"palu:rank=101,{QUALITY_ENDS}"  # not the 96 columns that 0.525 is rounded to
    rows = dict([
        scored("full", 1.0, 1.0), scored("palu:rank=0.5", 0.0, 1.6), scored("palu:rank=0.525", 0.05, 1.53),
        scored("streamingkv:rank=0.5", 0.1, 1.531, 50.0), scored("palu:rank=0.5,rank_by=fisher", -0.2, 1.6),
        scored("streamingkv:rank=0.5,rank_by=fisher", -0.1, 1.531),
        scored("streamingkv:rank=0.5,head_group=1", -0.1, 1.531),
    ])
    gains = {(g.spec, g.over): g for g in text_gains(rows)}
    assert {pair: (g.why, round(g.mean, 9)) for pair, g in gains.items()} == {
        ("streamingkv:rank=0.5", "palu:rank=0.5"): ("the same ranks", 0.1),
        ("streamingkv:rank=0.5", "palu:rank=0.525"): ("the same bytes", 0.05),
        ("palu:rank=0.5,rank_by=fisher", "palu:rank=0.5"): ("uniform ranks", -0.2),
        ("streamingkv:rank=0.5,rank_by=fisher", "palu:rank=0.5,rank_by=fisher"): ("the same ranks", 0.1),
    }
    found = {g.over: g for g in needle_gains(rows) if g.spec == "streamingkv:rank=0.5"}["palu:rank=0.5"]
    assert found.mean == 25.0 and (found.by_task.won, found.by_task.of) == (1, 2)  # of tasks, not of needles
    assert (found.by_sample.won, found.by_sample.lost, found.by_sample.of) == (2, 0, 6)


def test_gains_are_tested_over_tasks_as_well_as_over_windows():
    """Four windows each of six tasks, one window of each worse: over tasks all are won, and six can decide."""
    for tasks in (5, 6):
        others = {str(task): [1.0, 2.0, 3.0, 4.0] for task in range(tasks)}
        scores = {task: [a + d for a, d in zip(own, (0.2, 0.2, -0.1, 0.3), strict=True)] for task, own in others.items()}
        gain = paired_gain("a", "b", "", scores, others)
        assert (gain.by_task.won, gain.by_task.lost, gain.by_sample.won) == (tasks, 0, 3 * tasks)
        assert gain.mean == pytest.approx(0.15)
        assert gain.by_task.p == pytest.approx(2 / 2**tasks) == gain.by_task.least  # all signs alike: two of all draws
        assert (gain.by_task.p < 0.05) == (tasks == 6)
    with pytest.raises(ValueError, match="a and b were not scored on the same samples"):
        paired_gain("a", "b", "", {"x": [1.0]}, {"y": [1.0]})


@pytest.mark.parametrize("task", [MIXED, "changes"])
def test_a_task_is_windows_of_its_texts(task):
    try:
        text, cut = windows_of(Characters(), task, 60, 20, 2, seed=1)
    except FileNotFoundError as error:
        pytest.skip(str(error))  # a Python without idlelib
    assert [window.shape for window in cut] == [(60, 20)] * 2 and cut[0].context != cut[1].context
    names = ("prose", "code") if task == MIXED else (task, task)
    for name, tokens in zip(names, (cut[1].context, cut[1].scored), strict=True):
        assert bytes(tokens) in b"".join(bytes(Characters()(part).input_ids) for part in text_of(name).texts)
    assert text.sha256 != load_corpus(CALIBRATE).sha256
    with pytest.raises(ValueError, match="'changes': the text has|'prose, then code': the text has"):
        windows_of(Characters(), task, 60, 20, 10**6, seed=1)


def test_unknown_tasks_are_refused_before_anything_is_measured(capsys):
    assert main(["streaming", "--studies", "quality", "--tasks", "poems"]) == 2
    assert "task='poems': allowed are prose, code" in capsys.readouterr().err


def test_needles_hide_in_contexts_of_the_length_that_was_asked_for(tmp_path):
    def words(text, **_):
        return types.SimpleNamespace(input_ids=text.split())

    (tmp_path / "essay.txt").write_text("A sentence of seven words stands here. " * 200)
    settings = dict(seed=1, least=0.8, haystack=tmp_path / "essay.txt")
    asked = long_needles(words, ("niah_single_1", "niah_single_2"), 1152, 2, **settings)
    assert [q.task for q in asked] == ["niah_single_1"] * 2 + ["niah_single_2"] * 2
    for question in asked:
        assert 0.8 * 1152 <= len(question.context.split()) <= 1024
        (value,) = question.details["outputs"]
        assert value in question.context and question.score(f" {value}.") == 1 and question.score("1234567") == 0
    with pytest.raises(ValueError, match="task='vt': allowed are niah_single_1"):
        long_needles(words, ("vt",), 1152, 2, **settings)
    with pytest.raises(ValueError, match="samples=2: only 0 of niah_single_2 are about 1152 tokens long"):
        long_needles(words, ("niah_single_2",), 1152, 2, **settings | {"least": 0.95})


def test_rebuilt_keys_and_values_are_compared_by_layer():
    specs = ("palu:rank=1.0", "palu:rank=0.5", "streamingkv:rank=0.5,alpha=0.5")
    methods = {spec: parse_method(spec) for spec in specs}
    moments = collect_moments(model(), np.asarray(prompts(4, 64)))
    bases = {spec: m.fit(PLAIN.attention, moments) for spec, m in methods.items()}
    rows = reconstruction(model(), methods, bases, {"text": np.asarray(prompts(1, 64, seed=7))})
    assert len(rows) == 3 * 3 * 2
    by = {(row.spec, row.side): row for row in means(rows)}
    for side in ("k", "v"):
        full, static, moved = (by[spec, side] for spec in methods)
        assert full.cosine == pytest.approx(1, abs=1e-5) and full.lost < 1e-9
        assert static.lost > moved.lost > 0 and static.cosine < moved.cosine and static.explained < moved.explained
    steps = (("sum", 0.0), ("bound", 0.1))
    hidden = hidden_updates(model(), moments, np.asarray(prompts(1, 64))[0], steps=steps)
    losses = {(h.side, h.scale): h.lost for h in hidden}
    assert losses["v", "bound"] > losses["v", "sum"] > 0


def test_the_stream_study_prints_its_table(capsys):
    assert main(["streaming", "--studies", "stream"]) == 0
    out = capsys.readouterr().out
    assert "prefill_decode" in out and "normalised reconstruction error" in out
    assert main(["streaming", "--rounds", "0"]) == 2
    assert "--rounds 0: must be at least 1" in capsys.readouterr().err
