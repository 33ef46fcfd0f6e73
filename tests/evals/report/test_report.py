"""Reports of result files: which records count, which of them are compared, and what is said about the others."""

import json
import math

import numpy as np
import pytest
from scipy.stats import wilcoxon

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.report import draw_figures, markdown, read_report, read_sections, statistics
from lowrank_kv_jax.evals.report.by_length import bytes_by_length, quality_by_length
from lowrank_kv_jax.evals.report.figures import _far_apart, _perplexity, _settings
from lowrank_kv_jax.evals.report.markdown import cells
from lowrank_kv_jax.evals.report.statistics import EXACT, Interval, wilcoxon_p
from lowrank_kv_jax.evals.report.times import times_by_rows
from lowrank_kv_jax.evals.results.figure_file import pyplot
from lowrank_kv_jax.evals.results.records import read_records


def score(method="full", index=0, value=50.0, **fields):
    return {"command": "eval ruler", "model": "m", "fingerprint": "a", "method": method, "task": "vt", "length": 64,
            "index": index, "seed": 0, "protocol": "query-agnostic", "score": value, "style": "base",
            "cache_dtype": "bfloat16", "source": "generated", "haystack": None, "cache_bytes": 10,
            "full_cache_bytes": 20, "bytes_per_token": 5.0, **fields}


def window(method="full", index=0, nll: float | None = 32.0, **fields):
    return {"command": "eval perplexity", "model": "m", "fingerprint": "a", "method": method, "length": 64, "step": 32,
            "task": "perplexity-stream", "index": index, "nll": nll, "scored_tokens": 32, "cache_dtype": "bfloat16",
            "text": {"name": "t", "sha256": "d" * 64}, "cache_bytes": 10, "full_cache_bytes": 20,
            "bytes_per_token": 5.0, **fields}


@pytest.fixture
def write(tmp_path):
    def write(*records, name="r.jsonl"):
        path = tmp_path / name
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return path

    return write


# ---- statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("won", "lost", "p"), [(11, 2, 0.0225), (12, 4, 0.0768), (20, 9, 0.0614), (40, 24, 0.0599)])
def test_p_is_exact_with_ties(won, lost, p):
    """Scores of 0 and 100: all ranks are tied, and the test is the sign test."""
    differences = np.concatenate([np.full(won, 100.0), np.full(lost, -100.0), np.zeros(9)])
    assert wilcoxon_p(differences) == pytest.approx(p, abs=5e-5)
    tail = sum(math.comb(won + lost, k) for k in range(lost + 1)) / 2 ** (won + lost)
    assert wilcoxon_p(differences) == pytest.approx(2 * tail, rel=1e-12)


@pytest.mark.parametrize("count", [2, 7, 13, 40, 200])
def test_p_is_scipys_exact_one_without_ties(count):
    differences = np.random.default_rng(count).permutation(np.arange(1.0, count + 1))
    differences[: count // 3] *= -1
    assert wilcoxon_p(differences) == pytest.approx(wilcoxon(differences, method="exact").pvalue, rel=1e-9)


def test_p_of_many_samples_is_the_normal_one(monkeypatch):
    differences = np.random.default_rng(0).normal(0.1, 1, EXACT)
    exact = wilcoxon_p(differences)
    monkeypatch.setattr(statistics, "EXACT", EXACT - 1)
    assert exact is not None and wilcoxon_p(differences) != exact
    assert wilcoxon_p(differences) == pytest.approx(exact, abs=1e-3)


# ---- likelihoods -------------------------------------------------------------------------------------------


def test_a_window_that_diverged_is_infinite(write, tmp_path):
    path = write(*(window(index=i) for i in range(3)), *(window("bad", i, None if i else 32.0) for i in range(3)),
                 *(window("worse", i, None) for i in range(2)), window("good", 0, 31.0), window("good", 2, 31.0))
    section, = read_report([path])
    _, bad, worse, good = section.entries
    assert bad.perplexity == worse.perplexity == bad.difference == Interval(math.inf)
    assert bad.p is None and worse.p is None and good.p == 0.5
    header, rows = cells(section)
    assert header[1] == "windows" and [row[1] for row in rows] == ["3", "3", "2", "2"]
    assert rows[1][-3:] == ["inf", "+inf", ""] and "inf: a window diverged" in markdown([section])
    assert "intervals over windows, too narrow of so few (3)" in markdown([section])
    assert draw_figures([section], tmp_path)[section.title]
    section, = read_report([path], "bad")
    assert section.entries[0].difference == Interval(-math.inf) and section.entries[2].difference is None


def test_close_perplexities_are_told_in_plain_numbers(write):
    section, = read_report([write(window(), window("close", nll=32.3))])
    figure = _perplexity(pyplot(), section)
    figure.canvas.draw()
    axis, (low, high) = figure.axes[0].yaxis, figure.axes[0].get_ylim()
    shown = [tick.get_text() for tick in axis.get_ticklabels(which="both") if low < tick.get_position()[1] < high]
    assert len(shown) > 2 and all(low < float(text) < high for text in shown)


def test_records_of_an_older_compare_are_left_out(write, capsys):
    old = {field: value for field, value in window().items() if field not in ("index", "text")} | {"command": "compare"}
    path = write(score(), window(), old, dict(old, index=0, text="pydoc"), old)
    assert len(read_report([path])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "3 with a likelihood without the index of its window" in error


# ---- what is compared --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "one", "other"), [
    ("fingerprint", "a", "b"), ("style", "base", "chat"), ("cache_dtype", "bfloat16", "float32"),
    ("source", "generated", "data"),
    ("haystack", {"name": "pydoc", "sha256": "1" * 16}, {"name": "pydoc", "sha256": "2" * 16}),
    ("prefill_chunk", None, 256), ("shapes", None, "one"), ("block", None, 16), ("turns", 3, 5),
])
def test_incomparable_scores_stand_apart(write, field, one, other):
    paths = [write(score(**{field: one}), name="a"), write(score("small", **{field: other}), name="b")]
    sections = read_sections(paths)
    titles = [section.title for section in sections]
    assert [len(section.entries) for section in sections] == [1, 1] and len(set(titles)) == 2
    assert all(f", query-agnostic, {field} " in title for title in titles)
    assert read_sections(paths[:1])[0].title == "eval ruler, m, 64 tokens, query-agnostic"


@pytest.mark.parametrize(("field", "other"), [
    ("fingerprint", "other"), ("cache_dtype", "other"), ("text", {"name": "t", "sha256": "e" * 64}), ("block", 16),
])
def test_incomparable_likelihoods_stand_apart(write, field, other):
    sections = read_report([write(window(), window("small", **{field: other}))])
    assert len(sections) == len({section.title for section in sections}) == 2
    assert all(f"by 32 tokens, {field} " in section.title for section in sections)


@pytest.mark.parametrize("make", [score, window])
def test_a_method_calibrated_on_several_texts_stands_as_several(write, make):
    one, other = ({"calibration": {"corpus": name, "sha256": name * 64}} for name in "ab")
    path = write(*(make("ojakv", i, 60.0, **one) for i in range(4)), *(make("ojakv", i, 30.0, **other) for i in range(2)),
                 *(make("palu", i, 30.0, **one) for i in range(2)), make("full"))
    section, = read_report([path])
    assert [entry.method for entry in section.entries] == [
        "ojakv [a aaaaaaaaaaaa]", "ojakv [b bbbbbbbbbbbb]", "palu", "full"]
    assert [len(entry.windows if make is window else entry.scores["vt"]) for entry in section.entries] == [4, 2, 2, 1]


@pytest.mark.parametrize("make", [score, window])
def test_a_method_with_several_blocks_of_its_own_stands_as_several(write, make):
    older, newer, asked = {}, {"block": None, "own_block": 16}, {"block": 16, "own_block": None}
    path = write(make("transform", 0, 60.0, **older), *(make("transform", i, 50.0, **newer) for i in range(2)),
                 make("transform", 0, 40.0, **asked), make("full", 0, **older), make("full", 1, block=None, own_block=None))
    first, other = sorted(read_report([path]), key=lambda section: -len(section.entries))
    assert [entry.method for entry in first.entries] == ["transform [block 32]", "transform [block 16]", "full"]
    assert [entry.method for entry in other.entries] == ["transform"] and ", block 16" in other.title
    assert [len(entry.windows if make is window else entry.scores["vt"]) for entry in first.entries] == [1, 2, 2]


def test_contexts_are_drawn_where_tasks_share_them(write):
    """Of retention, whose tasks ask the same contexts: four questions on each say no more than one."""
    values, tasks = (0.0, 0.0, 100.0, 100.0), [f"shared, question {i}" for i in range(4)]
    rows = [score(method, i, value + 10 * (method == "small"), task=task, command="eval retention")
            for task in tasks for i, value in enumerate(values) for method in ("full", "small")]
    apart = [{**row, "command": "eval needle"} for row in rows]
    files = write(*rows, name="a"), write(*apart, name="b")
    of_contexts, of_questions = (read_sections([file])[0].entries[1] for file in files)
    assert of_contexts.mean.high - of_contexts.mean.low > 1.5 * (of_questions.mean.high - of_questions.mean.low)
    assert of_contexts.p == wilcoxon_p(np.full(4, 10.0)) > of_questions.p
    rows[0]["prompt_sha256"], rows[1]["prompt_sha256"] = "1", "2"  # of one question the text differs
    assert read_sections([write(*rows, name="c")])[0].entries[1].p == wilcoxon_p(np.full(15, 10.0))


def test_errors_are_no_scores(write, capsys):
    assert main(["report", str(write(score(command="eval outputs")))]) == 2
    assert "no record with a score" in capsys.readouterr().err


def test_samples_pair_where_their_prompts_agree(write):
    rows = [score(index=i, prompt_sha256=str(i)) for i in range(3)]
    rows += [score("small", 0, 0.0, prompt_sha256="other"), score("small", 1, 40.0, prompt_sha256="1"),
             score("small", 2, 40.0)]
    _, small = read_sections([write(*rows)])[0].entries
    assert small.samples == 3 and small.difference == Interval(-10.0, -10.0, -10.0)


def test_records_that_give_way_to_other_prompts_are_told(write, capsys):
    again = [score("palu", i, prompt_sha256=prompt) for prompt in "ab" for i in range(3)]
    assert main(["report", str(write(score("palu", 0, prompt_sha256="a"), *again))]) == 0
    assert "palu: records left out: 3, whose tasks and samples stand again, later, with another" in capsys.readouterr().err


def test_bytes_are_those_of_the_records_that_count(write):
    again = {"cache_bytes": 5, "value": 100.0}
    section, = read_sections([write(score(cache_bytes=100), score(index=1), score(**again), score(index=1, **again))])
    assert section.entries[0].smaller == 4 and section.entries[0].mean.mean == 100 and len(section.records) == 2
    section, = read_report([write(window(cache_bytes=100), window(cache_bytes=5))])
    assert section.entries[0].smaller == 4 and len(section.records) == 1


@pytest.mark.parametrize("make", [score, window])
def test_bases_that_requests_share_are_counted_apart(write, make):
    """Records of before hold no such bytes; of bases alone there is no ratio."""
    path = write(make(), make("part", shared_bytes=5), make("bases", shared_bytes=10))
    header, rows = cells(*read_report([path]))
    begin = header.index("stored")
    assert header[begin : begin + 3] == ["stored", "bases apart", "nominal"]
    assert [row[begin : begin + 2] for row in rows] == [["2.00x", "2.00x"], ["2.00x", "4.00x"], ["2.00x", ""]]


# ---- figures -----------------------------------------------------------------------------------------------


def test_many_methods_are_drawn_by_family(write, tmp_path, monkeypatch):
    """The settings of a method, and of a composition, are one line, the best first, also where all store the same."""
    methods = ["full", "kivi:bits=4", *(f"kivi:bits=4+kvzip:keep={keep}" for keep in (0.5, 0.25)),
               *(f"kvpress/kvzip:{ratio}x" for ratio in (2, 4, 8)), *(f"palu:rank=0.{i}" for i in range(1, 7))]
    records = [score(method, index, 10.0 * index - number, task=task) for number, method in enumerate(methods)
               for index in (0, 1) for task in ("vt", "cwe")]
    legends = []
    monkeypatch.setattr("lowrank_kv_jax.evals.report.figures._legend", lambda _, labels: legends.append(labels))
    section, = read_sections([write(*records)])
    (figures,) = draw_figures([section], tmp_path / "figures").values()
    assert [path.name for _, path in figures] == ["1-pareto.png", "1-tasks.png"]
    assert legends == [["full", "kivi", "kivi+kvzip", "kvpress/kvzip", "palu"]]
    assert all(path.stat().st_size > 0 for _, path in figures)
    assert _far_apart([(1.0, 10.0), (1.01, 20.0), (1.5, 30.0), (2.0, 40.0)]) == [(2.0, 40.0), (1.5, 30.0), (1.01, 20.0)]
    assert [_settings(method) for method in methods[:3]] == ["", "bits=4", "bits=4 keep=0.5"]


def test_times_of_batches_of_other_sizes_stand_apart(write, tmp_path):
    """A batch of three takes longer than one of one: neither a median nor a line has both."""
    records = [score(method, i, length=length, rows=rows, ttft_s=seconds * rows + i) for method, seconds in (
        ("full", 2.0), ("small", 1.0)) for length in (64, 128) for rows, i in ((1, 0), (1, 1), (1, 3), (3, 2))]
    records += [score("alone", 0, length=64, rows=8, ttft_s=1.0), score("untimed", 0, length=64, rows=1, ttft_s=None)]
    sections = read_sections([write(*records)])
    assert times_by_rows(sections, "ttft_s") == {
        1: {"full": [(64, 3.0), (128, 3.0)], "small": [(64, 2.0), (128, 2.0)]},
        3: {"full": [(64, 8.0), (128, 8.0)], "small": [(64, 5.0), (128, 5.0)]},
    }
    captions = dict((path.name, caption) for figures in draw_figures(sections, tmp_path).values()
                    for caption, path in figures)
    assert captions["2-ttft-1.png"].endswith("rows in a batch: 1")
    assert captions["2-ttft-3.png"].endswith("rows in a batch: 3") and "2-throughput-1.png" not in captions


def test_quality_bytes_and_speed_against_length_are_one_figure(write, tmp_path):
    records = [score(method, i, length=length, rows=1, cache_bytes=(length + i) * 2**20, decode_tokens_per_s=length / 100 + i,
                     timed_length=64) | {"score": 10.0 * i + length / 64}
               for method in ("full", "small") for length in (64, 8192) for i in (0, 2)]
    sections = read_sections([write(*records)])
    assert quality_by_length(sections)["small"] == [(64, 11.0), (8192, 138.0)]
    assert bytes_by_length(sections)["full"] == [(64, 65.0), (8192, 8193.0)]
    assert times_by_rows(sections, "decode_tokens_per_s") == {}  # all were timed at one length
    names = {path.name for figures in draw_figures(sections, tmp_path).values() for _, path in figures}
    assert "2-lengths.png" in names and "2-throughput-1.png" not in names
    one = [section for section in sections if section.length == 64]
    assert not any("lengths" in path.name for figures in draw_figures(one, tmp_path).values() for _, path in figures)


# ---- mistakes, and files in a bad state --------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "message"), [
    (["--baseline", "fulll"], "baseline 'fulll': no record has this method, only full, small"),
    (["--tasks", "vt", "niah_sngle_1"], "no record has the task 'niah_sngle_1', only perplexity-stream, vt"),
    (["--tasks", "ruler-6"], "no record has the task 'ruler-6'"),
])
def test_names_that_no_record_has_are_told(write, capsys, argv, message):
    path = write(score(), score("small"), window())
    assert main(["report", str(path), *argv]) == 2 and message in capsys.readouterr().err


def test_a_baseline_that_no_one_asked_for_may_be_missing(write):
    path = write(score("a"), score("b"))
    assert read_sections([path])[0].baseline is None and read_sections([path], "b")[0].baseline == "b"
    assert len(read_sections([path], tasks=["ruler-11"])) == 1


def test_lines_that_hold_no_record_are_counted_but_the_last(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2, "b\n{"a": 3}\n{"a": NaN}\n[4]\n{"a": 5}\n{"a": 6, "b')
    assert [record["a"] for record in read_records(path)] == [1, 3, 5]
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(path) in error and "no record: 3, the first is line 3" in error
    assert len(read_records(path)) == 3 and not capsys.readouterr().err  # said once
    path.write_text('{"a": 1}\n{"a": 2, "b')
    assert read_records(path) == [{"a": 1}] and not capsys.readouterr().err
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="r.jsonl: is not UTF-8"):
        read_records(path)


def test_records_that_cannot_be_counted_are_told(write, capsys):
    path = write(score(value="50"), score(value=True), score(index=1, method=["full"]), window(scored_tokens="x"),
                 window(nll="1"), score(cache_bytes="1"), json.dumps(score()).replace("50.0", "1e999"), score(index=2))
    assert read_sections([path])[0].samples == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for reason in ("3 with a score that is no finite number", "1 with a method", "1 with scored_tokens that are",
                   "1 with a nll", "1 with a cache_bytes"):
        assert reason in error
