"""Text that the model writes itself."""

import dataclasses

import chex
import helpers
import numpy as np
import pytest
from character_tokenizer import Characters

from lowrank_kv_jax.calibration import calibrate as calibrate_module
from lowrank_kv_jax.calibration import sampled
from lowrank_kv_jax.calibration.calibrate import calibrate, collect_moments, moments_for, serve
from lowrank_kv_jax.calibration.identifiers import with_identifiers
from lowrank_kv_jax.calibration.sampled import openings, sampled_windows
from lowrank_kv_jax.calibration.sensitivity import collect_sensitivity
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import LoadedModel

SHORT = dataclasses.replace(helpers.PLAIN, context=48, bos_id=3, eos_ids=(5,))


def model() -> LoadedModel:
    return LoadedModel("tiny", SHORT, helpers.model(helpers.PLAIN).params, Characters(), "a" * 64)


def test_texts_fill_the_context_open_in_turn_and_follow_the_seed():
    found = sampled_windows(model(), 3 * 48 - 5)
    assert found.shape == (3, 48) and found.dtype == np.int32
    assert found[:, 0].tolist() == [3, 5, 3]
    assert (found >= 0).all() and (found < SHORT.vocab_size).all()
    assert not np.array_equal(found[0, 1:], found[2, 1:])  # as they are drawn, not chosen
    np.testing.assert_array_equal(sampled_windows(model(), 96), found[:2])
    np.testing.assert_array_equal(sampled_windows(model(), 96, seed=2)[:1], found[2:])


def test_texts_are_written_some_at_a_time(monkeypatch):
    found = sampled_windows(model(), 3 * 48)
    monkeypatch.setattr(sampled, "ROWS", 2)
    np.testing.assert_array_equal(sampled_windows(model(), 3 * 48), found)


def test_windows_too_short_for_what_is_read_last_are_told_first(monkeypatch):
    monkeypatch.setattr(calibrate_module, "collect_moments", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="length=36: must be at least 37"):
        moments_for(model(), [parse_method("transform")], np.zeros((1, 36), np.int32))
    with pytest.raises(ValueError, match="length=4: must be at least 5"):
        moments_for(model(), [parse_method("kvzip:keep=0.5,layers=calibrated")], np.zeros((1, 4), np.int32))


def test_a_chat_opens_a_text_too():
    class Chatting(Characters):
        chat_template = "there is one"

        def apply_chat_template(self, turns, tokenize):
            return "<" + turns[0]["content"]

    assert openings(model()) == [3, 5]
    assert openings(dataclasses.replace(model(), tokenizer=Chatting())) == [3, 5, ord("<") % 60]
    assert openings(dataclasses.replace(model(), config=helpers.PLAIN, tokenizer=None)) == [0]


def test_second_moments_are_of_both_and_what_matters_of_the_corpus_alone():
    tokens, method = np.asarray(helpers.prompts(2, 40)), parse_method("transform:group=2")
    moments = moments_for(model(), [method], tokens, seed=4)
    texts = with_identifiers(sampled_windows(model(), 2 * tokens.size, 4), Characters(), 4)
    written = collect_moments(model(), texts, groups=[(0, 1)])
    both = moments.with_sampled()
    assert both.tokens == tokens.size + 4 * 48
    np.testing.assert_allclose(both.k, moments.k + written.k, rtol=1e-6)
    np.testing.assert_allclose(both.mean("v"), (moments.v_sum + written.v_sum) / both.tokens, rtol=1e-6)
    np.testing.assert_allclose(both.between("k_pre", (0, 1)), moments.between("k_pre", (0, 1))
                               + written.between("k_pre", (0, 1)), rtol=1e-6)
    np.testing.assert_array_equal(moments.sensitivity.v, collect_sensitivity(model(), tokens).v)
    np.testing.assert_array_equal(both.q, collect_moments(model(), tokens).q)
    spec = SHORT.attention
    assert serve(moments, method, spec) and not serve(moments._replace(sampled=None), method, spec)
    wide = method.fit(spec, moments)[0]
    alone = parse_method("transform:group=2,sampled=False").fit(spec, moments._replace(sampled=None))[0]
    assert not np.allclose(wide.k_mean, alone.k_mean)
    np.testing.assert_allclose(wide.k_mean.reshape(2, -1), both.mean("k_pre")[:2], rtol=1e-5)
    with pytest.raises(ValueError, match="no text that the model wrote.*sampled=False"):
        method.fit(spec, moments._replace(sampled=None))


def test_only_methods_that_read_it_have_the_model_write():
    moments = moments_for(model(), [parse_method("ojakv:rank=4")], np.asarray(helpers.prompts(1, 16)))
    assert moments.sampled is None and "sampled" not in moments.held


def test_a_run_that_was_killed_goes_on_with_text_of_its_own_seed(tmp_path, monkeypatch):
    text, method = ["the quick brown fox jumps over the lazy dog"], parse_method("transform:metric=plain")
    bases = calibrate(model(), method, text, length=43, seed=0)

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lowrank_kv_jax.calibration.calibrate.fit_bases", killed)
        calibrate(model(), method, text, length=43, seed=0, resume=tmp_path / "own")
    with pytest.raises(ValueError, match="own.sampled.npz: holds the unfinished calibration of"):
        calibrate(model(), method, text, length=43, seed=1, resume=tmp_path / "own")
    again = calibrate(model(), method, text, length=43, seed=0, resume=tmp_path / "own")
    chex.assert_trees_all_equal(again, bases)
    assert not list(tmp_path.iterdir())
