"""Corpora, second moments over them, and bases on disk."""

import argparse
import dataclasses
import functools
import json

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from character_tokenizer import Characters

from lowrank_kv_jax import methods
from lowrank_kv_jax.calibration.calibrate import (
    calibrate,
    collect_moments,
    fit_bases,
    iterate_taps,
    moments_for,
    serve,
)
from lowrank_kv_jax.calibration.checkpoint_sums import CheckpointedSums
from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus, token_windows
from lowrank_kv_jax.cli import calibrate as cli
from lowrank_kv_jax.methods.parse import parse_method
from lowrank_kv_jax.models.load import LoadedModel
from lowrank_kv_jax.saving.saved_bases import describe_bases, load_bases, save_bases


@functools.cache
def model(config=helpers.PLAIN, fingerprint="a" * 64) -> LoadedModel:
    return LoadedModel("tiny", config, helpers.model(config).params, Characters(), fingerprint)


TEXT = "the quick brown fox jumps over the lazy dog; " * 20


# ---- corpora


def test_default_corpus_is_prose_that_comes_with_python():
    corpus = load_corpus()
    assert corpus.name == "pydoc" and sum(map(len, corpus.texts)) > 100_000
    assert corpus == load_corpus("pydoc") and corpus.sha256 != load_corpus("python").sha256


def test_halves_of_the_default_corpus_are_disjoint_and_make_up_the_whole():
    first, second = load_corpus("pydoc:first").texts, load_corpus("pydoc:second").texts
    assert first + second == load_corpus("pydoc").texts and len(first) > 5 < len(second)


def test_files_are_read_and_known_by_their_content(tmp_path):
    for name, text in (("a.txt", "One."), ("b.txt", "Two."), ("c.txt", "One.")):
        (tmp_path / name).write_text(text)
    a, b, c = (load_corpus(tmp_path / f"{name}.txt") for name in "abc")
    assert a.texts == ("One.",) and a.sha256 == c.sha256 != b.sha256
    both = load_corpus([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert both.texts == ("One.", "Two.") and both.sha256 != Corpus.of(["One.Two."]).sha256


@pytest.mark.parametrize("content, message", [(b"\xff\xfe\x00", "not UTF-8"), (b" \n", "holds no text")])
def test_unreadable_corpora_are_refused(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "bad.txt")


@pytest.mark.parametrize("source", ["pydok", "no/such/file.txt", "folder/missing.txt"])
def test_unknown_sources_are_named(source):
    with pytest.raises(FileNotFoundError, match=source):
        load_corpus(source)


def test_marks_and_line_ends_of_other_systems_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("One.\n\nTwö.".encode())
    (tmp_path / "b.txt").write_bytes("\ufeffOne.\r\n\r\nTwö.".encode())
    one, other = (load_corpus(tmp_path / f"{name}.txt") for name in "ab")
    assert one.texts == other.texts and one.sha256 == other.sha256


def test_a_directory_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        load_corpus(tmp_path)


def test_datasets_are_read_by_their_text_column_and_unreachable_ones_named(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"label": [0, 1], "sentence": ["One.", "Two."]})
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        if args[0] == "some/gone":
            raise ConnectionError("offline")
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_corpus("some/set:config:test").texts == ("One.", "Two.")
    assert asked[0] == (("some/set", "config"), {"split": "test"})
    with pytest.raises(FileNotFoundError, match="some/gone.*offline"):
        load_corpus("some/gone")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved", "saved splits"])
def test_folders_of_datasets_are_read_by_the_library_itself(tmp_path, monkeypatch, form):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_dict({"label": [0, 1], "text": ["One.", "Two."]})
    folder = tmp_path / "data"
    folder.mkdir()
    if form == "jsonl":
        rows.to_json(folder / "train.jsonl")
    elif form == "parquet":
        rows.to_parquet(folder / "train.parquet")
    elif form == "saved":
        rows.save_to_disk(folder)
    else:
        datasets.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(folder)
    assert load_corpus(folder).texts == ("One.", "Two.")


def test_folders_of_datasets_without_text_or_a_train_split_are_named(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    numbers = datasets.Dataset.from_dict({"label": [0, 1]})
    numbers.save_to_disk(tmp_path / "numbers")
    with pytest.raises(ValueError, match="numbers.*no text column, only label"):
        load_corpus(tmp_path / "numbers")
    datasets.DatasetDict(test=numbers).save_to_disk(tmp_path / "test_only")
    with pytest.raises(ValueError, match="test_only.*train"):
        load_corpus(tmp_path / "test_only")


def test_windows_are_disjoint_evenly_spaced_and_follow_the_seed():
    texts = ["".join(chr(i % 60) for i in range(500)), "".join(chr(i % 60) for i in range(500, 1000))]
    windows = token_windows(Characters(), texts, 64, 5)
    assert windows.shape == (5, 64) and windows.dtype == np.int32
    assert ((np.diff(windows, axis=1) - 1) % 60 == 0).all()  # documents are joined without a gap
    assert len(np.unique(np.diff(windows[:, 0]) % 60)) == 1  # equal strides
    assert not np.array_equal(windows, token_windows(Characters(), texts, 64, 5, seed=1))
    np.testing.assert_array_equal(windows, token_windows(Characters(), texts, 64, 5, seed=0))
    assert len(token_windows(Characters(), texts, 400, 5)) == 2


def test_windows_open_like_a_sequence_where_the_tokenizer_does():
    windows = token_windows(Characters(bos=61), [TEXT], 16, 3)
    assert windows.shape == (3, 16) and (windows[:, 0] == 61).all() and (windows[:, 1:] < 60).all()


def test_a_corpus_too_short_for_one_window_says_how_many_tokens_it_has():
    with pytest.raises(ValueError, match="length=64: must be at most 10, as the corpus has 10 tokens"):
        token_windows(Characters(), ["short text"], 64, 4)
    with pytest.raises(ValueError, match="--text-length 64: must be at most 10"):
        token_windows(Characters(), ["short text"], 64, 4, name="--text-length ")
    with pytest.raises(ValueError, match="corpus 'a.txt': has 10 tokens, must have at least 63"):
        token_windows(Characters(bos=61), ["short text"], 64, 4, corpus="a.txt")


# ---- moments


@pytest.mark.parametrize("config", [helpers.QWEN, helpers.WINDOWED], ids=lambda c: c.family)
def test_moments_are_sums_of_outer_products_of_the_taps(config):
    tokens = np.asarray(helpers.prompts(3, 40, vocab=config.vocab_size))
    moments = collect_moments(model(config), tokens)
    assert moments.tokens == tokens.size and moments.k.dtype == np.float64
    for layer, taps in enumerate(iterate_taps(config, model(config).params, jnp.asarray(tokens))):
        for name in ("k", "k_pre", "v"):
            x = np.asarray(getattr(taps, name), np.float64).reshape(tokens.size, -1)
            np.testing.assert_allclose(getattr(moments, name)[layer], x.T @ x, rtol=1e-4, atol=1e-4)
        q = np.asarray(taps.q, np.float64).reshape(tokens.size, config.kv_heads, -1, config.head_dim)
        want = np.einsum("tkgd,tkge->kde", q, q)
        np.testing.assert_allclose(moments.q[layer], want, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.trace(moments.q_pre[layer].sum(0)), np.trace(want.sum(0)), rtol=1e-4)


def test_layers_taken_together_and_what_their_moments_serve(tmp_path):
    tokens, spec = np.asarray(helpers.prompts(3, 40)), helpers.PLAIN.attention
    pair, single = (parse_method(f"transform:metric=plain,group={group},sampled=False") for group in (2, 1))
    moments = moments_for(model(), [pair, single], tokens)
    assert list(moments.across) == [(0, 1)]
    taps = list(iterate_taps(helpers.PLAIN, model().params, jnp.asarray(tokens)))
    for name in ("k", "k_pre", "v"):
        x = np.concatenate([np.asarray(getattr(own, name), np.float64).reshape(tokens.size, -1) for own in taps[:2]], axis=1)
        np.testing.assert_allclose(moments.between(name, (0, 1)), x.T @ x, rtol=1e-4, atol=1e-4)
    assert serve(moments, pair, spec) and serve(moments, single, spec)
    assert not serve(moments, parse_method("transform:metric=plain,group=3,sampled=False"), spec)
    assert not serve(moments, parse_method("transform"), spec)  # no sensitivity
    both = [parse_method(f"transform:metric=plain,group={group},sampled=False,kv=joint") for group in (1, 2)]
    assert not serve(moments, both[0], spec)
    moments = moments_for(model(), [both[1]], tokens)
    assert list(moments.keys_by_values) == [(0, 1), (2,)] and serve(moments, both[1], spec) and not serve(moments, both[0], spec)
    for name in ("k", "k_pre"):
        k, v = (np.concatenate([np.asarray(getattr(own, tap), np.float64).reshape(tokens.size, -1) for own in taps[:2]], axis=1)
                for tap in (name, "v"))
        np.testing.assert_allclose(moments.by_values(name, (0, 1)), k.T @ v, rtol=1e-4, atol=1e-4)
    # a run that was killed goes on with them
    wanted = {"groups": [(0, 1)], "by_values": [(0, 1), (2,)]}
    held = CheckpointedSums(tmp_path / "sums.npz", {})
    collect_moments(model(), tokens[:1], sums=held, **wanted)
    again = CheckpointedSums(tmp_path / "sums.npz", {})
    resumed = collect_moments(model(), tokens, sums=again, **wanted)
    np.testing.assert_allclose(resumed.between("v", (0, 1)), moments.between("v", (0, 1)), rtol=1e-6)


@pytest.mark.parametrize("tap, where", [("v_proj", "v"), ("k_proj", "k")])
def test_nan_in_calibration_names_layer_and_tap(tap, where):
    params = dict(model().params)
    layers = list(params["layers"])
    layers[1] = jax.tree.map(jnp.copy, layers[1])
    layers[1]["attention"][tap]["kernel"] = layers[1]["attention"][tap]["kernel"].at[0, 0].set(jnp.nan)
    broken = dataclasses.replace(model(), params=params | {"layers": tuple(layers)})
    with pytest.raises(ValueError, match=f"tap '{where}' in layer 1 are not finite"):
        collect_moments(broken, np.asarray(helpers.prompts(1, 16)))


@pytest.mark.parametrize("tokens, message", [
    (np.zeros((0, 8), np.int32), "non-empty"),
    (np.zeros((1, 513), np.int32), "context is 512"),
    (np.full((1, 8), 64, np.int32), "vocabulary has 64"),
])
def test_bad_windows_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        collect_moments(model(), tokens)


# ---- calibrate


def test_calibrated_bases_are_the_leading_directions_and_bfloat16():
    method = methods.StaticPCA(rank=4)
    bases = calibrate(model(), method, [TEXT], length=64, windows=3)
    assert len(bases) == helpers.PLAIN.num_layers
    assert bases[0].k.shape == (4, 8, 4) and bases[0].k.dtype == jnp.bfloat16
    moments = collect_moments(model(), token_windows(Characters(), [TEXT], 64, 3))
    want = np.linalg.eigh(moments.per_head("v", 4)[2, 1])[1][:, ::-1][:, :4]
    got = np.asarray(bases[2].v[1], np.float64)
    np.testing.assert_allclose(np.abs(np.sum(want * got, axis=0)), 1.0, atol=0.02)


def test_methods_without_bases_need_no_corpus():
    assert calibrate(model(), methods.Full()) == calibrate(model(), methods.SingleSVD()) == (None,) * 3


def test_methods_that_do_not_suit_the_model_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="rank=33"):
        calibrate(model(), methods.OjaKV(rank=33), ["too short"])


def test_fused_projections_are_refused_before_moments_are_collected(monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.calibration.calibrate.collect_moments", None)
    fused = dataclasses.replace(model(), params={"layers": [{"attention": {"qkv": {}, "o": {}}}]})
    with pytest.raises(ValueError, match="rank_by='fisher': .* have no projections of their own .found o, qkv.; use rank_by='uni"):
        calibrate(fused, methods.parse.parse_method("palu:rank=0.5,rank_by=fisher"), [TEXT], length=64)


def test_the_command_saves_what_load_bases_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: model())
    (tmp_path / "foxes.txt").write_text(TEXT)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    corpus, out = str(tmp_path / "foxes.txt"), str(tmp_path / "out")
    common = ["calibrate", "--corpus", corpus, "--length", "64", "--out", out]
    args = parser.parse_args([*common, "--method", "ojakv:rank=4"])
    assert args.run(args) == 0
    assert "k rank 4, v rank 4" in capsys.readouterr().out
    assert load_bases(tmp_path / "out", model(), methods.OjaKV(rank=4))[2].v.shape == (1, 32, 4)
    assert describe_bases(tmp_path / "out")["settings"] == {"length": 64, "windows": 4, "seed": 0, "refine": 0}
    args = parser.parse_args([*common, "--method", "transform:bits=1,profiles=1,sampled=False", "--refine", "2"])
    assert args.run(args) == 0 and describe_bases(tmp_path / "out")["settings"]["refine"] == 2
    args = parser.parse_args([*common, "--method", "full"])
    with pytest.raises(ValueError, match="nothing from calibration"):
        args.run(args)


def test_the_length_that_is_saved_is_the_one_that_was_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: model())
    (tmp_path / "foxes.txt").write_text(TEXT * 20)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    given = ["calibrate", "--method", "ojakv:rank=4", "--corpus", str(tmp_path / "foxes.txt"), "--windows", "1", "--out",
             str(tmp_path / "out")]
    args = parser.parse_args([*given, "--length", "513"])
    with pytest.raises(ValueError, match="^--length 513: must be at most 512, the model's context of 512 tokens"):
        args.run(args)
    args = parser.parse_args(given)
    assert args.run(args) == 0 and describe_bases(tmp_path / "out")["settings"]["length"] == 512


def test_windows_that_are_done_outlive_a_save_that_fails(tmp_path, monkeypatch):
    def fails(*args, **more):
        raise OSError("the disk is full")

    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: model())
    (tmp_path / "foxes.txt").write_text(TEXT)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["calibrate", "--corpus", str(tmp_path / "foxes.txt"), "--length", "64", "--out",
                              str(tmp_path / "out"), "--method", "static-pca:rank=0.5"])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("lowrank_kv_jax.saving.saved_bases.save_bases", fails)
        args.run(args)
    assert (tmp_path / "out.moments.npz").exists()
    assert args.run(args) == 0 and not (tmp_path / "out.moments.npz").exists()


@pytest.mark.parametrize("spec, told", (
    ("transform:bits=2,sampled=False", "k rank "),
    ("kvzip:keep=0.5", "shares of the layers "),
    ("ojakv:rank=4+kvzip:keep=0.5", "k rank 4, v rank 4, shares of the layers "),
))
def test_the_command_says_what_it_saved(tmp_path, monkeypatch, capsys, spec, told):
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: model())
    (tmp_path / "foxes.txt").write_text(TEXT)
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["calibrate", "--corpus", str(tmp_path / "foxes.txt"), "--length", "64", "--windows", "1",
                              "--out", str(tmp_path / "out"), "--method", spec])
    assert args.run(args) == 0
    assert told in capsys.readouterr().out
    method = parse_method(spec)
    assert len(load_bases(tmp_path / "out", model(), method)) == len(method.layer_groups(model().config.attention))


# ---- on disk


@functools.cache
def fitted(method):
    return fit_bases(model(), method, helpers.random_moments(helpers.PLAIN))


@pytest.mark.parametrize("method", [
    methods.OjaKV(rank=4), methods.StaticPCA(energy=0.9), methods.EigenAttention(rank_k=6, rank_v=3),
], ids=lambda m: m.name)
def test_bases_come_back_bit_for_bit(tmp_path, method):
    bases, corpus = fitted(method), Corpus.of([TEXT], "foxes")
    save_bases(tmp_path / "bases", bases, model(), method, corpus=corpus, settings={"length": np.int64(64)})
    loaded = load_bases(tmp_path / "bases", model(), method)
    chex.assert_trees_all_equal_structs(loaded, bases)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(bases), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    about = describe_bases(tmp_path / "bases")
    assert about["corpus"] == {"name": "foxes", "sha256": corpus.sha256}
    assert about["settings"] == {"length": 64}
    assert about["fingerprint"] == "a" * 64 and "jax" in about["versions"]
    assert [path.name for path in tmp_path.iterdir()] == ["bases"]


AFTER_ROPE = {"rope": "post", "heads": "per_head"}


@pytest.mark.parametrize("method", [
    methods.OjaKV(rank=0.5, **AFTER_ROPE), methods.OjaKV(rank=4, eta_pre=0.1, sinks=0, **AFTER_ROPE), methods.StaticPCA(rank=4),
])
def test_methods_that_fit_alike_share_their_bases(tmp_path, method):
    """What a method does with its bases, and how a rank is spelled, is no reason to calibrate again."""
    static = methods.StaticPCAH(rank=4)
    save_bases(tmp_path / "bases", fitted(static), model(), static)
    assert load_bases(tmp_path / "bases", model(), method)[0].k.shape == (4, 8, 4)


@pytest.mark.parametrize("method, reason", [
    (methods.StaticPCAH(rank=5), "rank_k=4, this method asks for 5"),
    (methods.StaticPCAH(rank=4, rank_v=2), "rank_v=4, this method asks for 2"),
    (methods.StaticPCAH(rank=4, rope="pre"), "rope='post', this method asks for 'pre'"),
    (methods.StaticPCAH(rank=4, heads="joint"), "heads='per_head'"),
    (methods.StaticPCAH(energy=0.9), "energy=None"),
    (methods.EigenAttention(rank=4, rope="post"), "fit="),
    (methods.Full(), "method=None, this method asks for 'full'"),
], ids=str)
def test_bases_of_another_method_are_refused_with_the_reason(tmp_path, method, reason):
    static = methods.StaticPCAH(rank=4)
    save_bases(tmp_path / "bases", fitted(static), model(), static)
    with pytest.raises(ValueError, match=reason):
        load_bases(tmp_path / "bases", model(), method)


def test_bases_of_another_model_are_refused(tmp_path):
    method = methods.OjaKV(rank=4)
    save_bases(tmp_path / "bases", fitted(method), model(), method)
    with pytest.raises(ValueError, match="belong to model 'tiny' with the weights aaaa.*not to 'tiny' .bbbb"):
        load_bases(tmp_path / "bases", model(fingerprint="b" * 64), method)


def test_damaged_or_missing_bases_are_refused(tmp_path):
    method = methods.OjaKV(rank=4)
    with pytest.raises(FileNotFoundError, match="no saved bases"):
        load_bases(tmp_path / "bases", model(), method)
    save_bases(tmp_path / "bases", fitted(method), model(), method)
    description = tmp_path / "bases" / "lowrank_kv.json"
    content = json.loads(description.read_text())
    content["groups"][0]["k"]["shape"] = [4, 8, 5]
    description.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"0\.k"):
        load_bases(tmp_path / "bases", model(), method)


def test_settings_and_corpus_that_no_save_can_hold(tmp_path):
    method = parse_method("static-pca-h:rank=0.5")
    for more, words in (({"settings": {"x": tmp_path}}, "settings=.*: must be an object that JSON can hold"),
                        ({"corpus": "pydoc"}, "corpus='pydoc': must be a Corpus, such as `load_corpus` returns")):
        with pytest.raises(ValueError, match=words):
            save_bases(tmp_path / "bases", fitted(method), model(), method, **more)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_leaves_nothing_behind(tmp_path):
    method = methods.OjaKV(rank=4)
    with pytest.raises(ValueError, match="expected 3 groups"):
        save_bases(tmp_path / "bases", fitted(method)[:2], model(), method)
    with pytest.raises(ValueError, match="nothing to save"):
        save_bases(tmp_path / "bases", (None,) * 3, model(), methods.Full())
    with pytest.raises(ValueError, match="settings takes 1 of"):
        save_bases(tmp_path / "bases", fitted(method), model(), methods.OjaKV(rank=2))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "NOTES.md").write_text("mine")
    with pytest.raises(FileExistsError):
        save_bases(tmp_path / "notes", fitted(method), model(), method)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
