"""What `lowrank-kv streaming` and `cross-layer` print of the analyses, and what they record."""

import dataclasses
import json

import pytest
from helpers import PLAIN
from suites import Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.studies.streaming import quality
from lowrank_kv_jax.evals.studies.streaming.quality import Score

OWN = ["palu:rank=0.5", "streamingkv:rank=0.5,alpha=0.5"]
SHORT = ["--context", "64", "--scored", "32"]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args, **kwargs: Loaded())
    monkeypatch.setattr("lowrank_kv_jax.cli.compilation_cache.enable_compilation_cache", lambda: None)


def streaming(tmp_path, *argv):
    record = tmp_path / "r.jsonl"
    assert main(["streaming", "--json", str(record), *argv]) == 0
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.slow
def test_distributions_and_columns_are_printed_drawn_and_recorded(tiny, tmp_path, capsys):
    found = streaming(tmp_path, "--studies", "distributions", "columns", "--text-length", "48", "--methods", *OWN, "--plot",
                      str(tmp_path / "f.png"))
    out = capsys.readouterr().out
    assert "quantiles over tokens, all layers" in out and "explained variance by the first columns" in out
    assert {path.name for path in tmp_path.glob("*.png")} == {"f-distributions.png", "f-columns.png"}
    layers, cases = 3, 2 * 2 * 2
    assert [r["task"] for r in found] == ["distributions"] * (layers + 1) * cases + ["columns"] * layers * cases
    assert {(r["method"], r["text"]) for r in found} == {(spec, text) for spec in OWN for text in ("pydoc:second", "python")}


def test_reconstruction_takes_no_more_tokens_than_the_context(tiny, tmp_path, capsys):
    found = streaming(tmp_path, "--studies", "reconstruction", "--ranks", "0.5", "--methods", OWN[0])
    assert "equation 15 on hidden states" in capsys.readouterr().out
    assert {r["task"] for r in found} == {"reconstruction", "hidden"} and {r["length"] for r in found} == {PLAIN.context}


@pytest.mark.parametrize("changes, message", [
    ({"config": dataclasses.replace(PLAIN, qk_norm=True)}, "qk_norm=True: the study reconstruction is of models whose keys"),
    ({"config": dataclasses.replace(PLAIN, qkv_bias=True)}, "qkv_bias=True: the study reconstruction is of models whose keys"),
    ({"params": {"layers": [{"attention": {"qkv": {}, "o": {}}}]}}, "have no projections of their own (found o, qkv)"),
])
def test_reconstruction_is_refused_before_anything_is_measured(tiny, changes, message, monkeypatch, capsys):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *_: Loaded(**changes))
    assert main(["streaming", "--studies", "stream", "reconstruction"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err


@pytest.mark.parametrize("options, message", [
    ("quality", "rank_by='fisher': this model's keys and values have no projections of their own (found o, qkv)"),
    ("ablation --methods palu:rank=0.5,rank_by=fisher", "rank_by='fisher': this model's keys and values have no proj"),
    ("columns --text-length 48 --methods palu:rank=0.5,rank_by=fisher", "rank_by='fisher': this model's keys and values"),
    ("fisher", "the study fisher: this model's keys and values have no projections of their own"),
    ("ablation --methods palu:rank=0.5,head_group=3", "palu:rank=0.5,head_group=3: head_group=3: must divide"),
])
def test_methods_are_refused_before_anything_is_measured(tiny, options, message, monkeypatch, capsys):
    fused = Loaded(params={"layers": [{"attention": {"qkv": {}, "o": {}}}]})
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *_: fused)
    assert main(["streaming", *SHORT, "--studies", "stream", *options.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err


@pytest.mark.slow
def test_the_fisher_overlap_is_printed_drawn_and_recorded(tiny, tmp_path, capsys):
    found = streaming(tmp_path, "--studies", "fisher", "--windows", "1", "--bands", "2", "--plot", str(tmp_path / "f.png"))
    assert "Fisher overlap of pydoc:first and python" in capsys.readouterr().out and (tmp_path / "f.png").exists()
    assert [(r["task"], r["side"], len(r["overlap"][0])) for r in found] == [("fisher-overlap", side, 2) for side in "kv"]


def test_prompts_and_answers_are_timed(tiny, tmp_path, capsys):
    found = streaming(tmp_path, "--studies", "prefill", "--timed-length", "40", "--rounds", "1", "--methods", "full", OWN[0])
    assert "a prompt of 40 tokens and 32 more" in capsys.readouterr().out
    assert [(r["task"], r["method"], len(r["prefill"])) for r in found] == [
        ("prefill-and-decode", "full", 1), ("prefill-and-decode", OWN[0], 1)]


def test_what_learning_adds_is_printed(tiny, tmp_path, capsys):
    (found,) = streaming(tmp_path, "--studies", "learning", "--timed-length", "40", "--rounds", "1", "--methods", OWN[0])
    assert "a prompt of 40 tokens" in capsys.readouterr().out
    assert (found["task"], found["method"]) == ("learning", OWN[0]) and found["flops"] > found["coding"][0] > 0


def test_the_spread_is_of_the_grid_that_was_given(tiny, tmp_path, capsys, monkeypatch):
    asked = []

    def scores(model, specs, settings, tasks, **_):
        asked.extend(specs)
        return {spec: Score(spec, {}, {task: [2.0 - 0.01 * i] for task in tasks}, {}, {}, 1.0) for i, spec in enumerate(specs)}

    monkeypatch.setattr(quality, "scores", scores)
    (found,) = streaming(tmp_path, "--studies", "spread", *SHORT, "--ranks", "0.5", "--tasks", "code", "--etas", "1e-5", "--alphas",
                         "0.1", "0.2", "--iterations", "2", "--steps", "10", "32", "--prefill", "compressed")
    assert len(asked) == 5 and all("prefill=compressed" in spec for spec in asked)
    assert (found["settings"], found["least"], found["most"]) == (4, pytest.approx(0.01), pytest.approx(0.04))
    assert "4 settings: nats a token" in capsys.readouterr().out
    assert found["grid"]["steps"] == [10, 32]


def test_ablations_attend_as_asked(tiny, tmp_path, monkeypatch):
    asked = []

    def scores(model, specs, settings, tasks, **_):
        asked.extend(specs)
        return {spec: Score(spec, dict.fromkeys(tasks, 1.0), {task: [0.0] for task in tasks}, {}, {}, 1.0) for spec in specs}

    monkeypatch.setattr(quality, "scores", scores)
    assert main(["streaming", "--studies", "ablation", *SHORT, "--prefill", "compressed"]) == 0
    assert asked[0] == "full" and all(spec.endswith("prefill=compressed") for spec in asked[1:]) and len(asked) > 20
    asked.clear()
    assert main(["streaming", "--studies", "ablation", *SHORT, "--methods", *OWN]) == 0
    assert asked == ["full", *OWN]


def test_adjacent_layers_are_printed(tiny, tmp_path, capsys):
    record = tmp_path / "r.jsonl"
    assert main(["cross-layer", "--latents", "0.5", "--length", "64", "--json", str(record), "--plot",
                 str(tmp_path / "p.png")]) == 0
    assert "lost in a merge" in capsys.readouterr().out and (tmp_path / "p.png").exists()
    tasks = [json.loads(line)["task"] for line in record.read_text().splitlines()]
    assert tasks[0] == "adjacent keys as cached" and len(tasks) == 5


@pytest.mark.parametrize("words, message", [
    ("streaming --studies stream columns --text-length 48 --texts none.txt", "corpus 'none.txt': no such file"),
    ("streaming --studies stream columns --text-length 600", "--text-length 600: must be at most 512, the model's context"),
    ("streaming --studies stream fisher --corpora none.txt pydoc", "corpus 'none.txt': no such file"),
    ("streaming --studies stream quality --context 500 --scored 20", "--context 500: must be at most 492, the model's context"),
    ("streaming --studies stream spread --tasks nothing", "task='nothing': allowed are prose"),
    ("streaming --studies stream speed --timed-length 99999999", "--timed-length 99999999: must be at most 448, the model's"),
    ("cross-layer --length 64 --groups 1 --costs xkv:group=1 --cost-length 500", "--cost-length 500: must be at most 496, the model's context of 512"),
    ("cross-layer --length 64 --groups 1 --costs kivi:bits=4 --cost-length 128", "kivi:bits=4: stores no bases of keys and"),
    ("roofline --lengths 64 99999999", "--lengths 99999999: must be at most 512, the model's context of 512 tokens"),
    ("cross-layer --quality 64 600", "--quality 600: must be at most 512, the model's context of 512 tokens"),
])
def test_mistakes_are_told_before_anything_is_measured(tiny, words, message, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err


def test_cross_layer_loads_as_others_do(tiny, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: done.append(args) or Loaded())
    monkeypatch.setattr("lowrank_kv_jax.cli.compilation_cache.enable_compilation_cache", lambda: done.append("cached"))
    assert main(["cross-layer", "--model", "some", "--dtype", "bfloat16", "--latents", "0.5", "--length", "32"]) == 0
    assert done == ["cached", ("some", "bfloat16", None)]


@pytest.mark.parametrize("words, message", [
    ("streaming --studies columns --texts {} --methods palu:rank=0.5 --text-length 48", "--text-length 48: must be at most 5, as"),
    ("streaming --studies fisher --corpora pydoc {}", "short': has 5 tokens, must have at least 512"),
    ("estimators --length 64 --page 16 --texts {0} {0}", "--length 64: must be at most 5, as the corpus has 5 tokens"),
    ("cross-layer --length 64 --text {}", "--length 64: must be at most 5, as the corpus has 5 tokens"),
    ("falsify --length 64 --lengths 64 --scored 16 --texts {0} {0}", "short': has 5 tokens, must have at least 80"),
    ("diagnose --length 64 --test {} --methods static-pca:rank=0.5", "short': has 5 tokens, must have at least 64"),
    ("eval perplexity --length 64 --step 32 --methods full --text {}", "length=64: must be at most 5, as many as the text has"),
    ("eval perplexity --length 64 --step 32 --methods ojakv --calibrate {}", "short': has 5 tokens, must have at least 512"),
    ("bench decode --lengths 64 --methods full --corpus {}", "lengths=64: must be at most 5, as the corpus has 5 tokens"),
])
def test_texts_that_are_too_short_are_refused(tiny, tmp_path, words, message, capsys):
    (tmp_path / "short").write_text("short")
    assert main(words.format(tmp_path / "short").split()) == 2
    assert message in capsys.readouterr().err
