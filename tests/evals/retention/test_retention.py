"""Retention: contexts with several needles, three ways to ask, and what records and tables hold."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import PLAIN, model
from suites import Letters, Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate
from lowrank_kv_jax.evals.perplexity.score import perplexity
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.retention.contexts import make_context
from lowrank_kv_jax.evals.retention.questions import cut_text, questions_of
from lowrank_kv_jax.evals.retention.run import evaluate_retention, mean_nll
from lowrank_kv_jax.methods.parse import parse_method


def test_contexts_hold_their_needles_and_fit():
    found = make_context(Letters(), 700, 3, seed=0, index=1)
    assert found == make_context(Letters(), 700, 3, 0, 1) != make_context(Letters(), 700, 3, 0, 2)
    assert 600 < len(found.text) <= 700
    lines = found.text.split("\n")
    places = [next(i for i, line in enumerate(lines) if needle.value in line) for needle in found.needles]
    assert np.argsort(places).tolist() == np.argsort([needle.depth for needle in found.needles]).tolist()
    own = make_context(Letters(), 700, 2, 0, 0, ["One sentence.", "And another."]).text.split("\n")
    assert {"One sentence.", "And another."} < set(own) and len(own) == len(set(own)) + own.count("One sentence.") + own.count("And another.") - 2
    with pytest.raises(ValueError, match="length=100: must be at least [0-9]+, the needles alone take so many tokens"):
        make_context(Letters(), 100, 3, 0, 0)


def test_what_is_asked_in_each_mode():
    context = make_context(Letters(), 700, 3, 0, 0)
    asked = questions_of(context, 700, 4, ("shared", "turns", "distance"), (0, 9), ("", "OTHERTEXT"))
    assert {q.context for q in asked} == {context.text} and {q.index for q in asked} == {4}
    by_task = {q.task: q for q in asked}
    assert len(by_task) == len(asked) == 3 + 3 + 2
    first, second, third = context.needles
    assert by_task["shared, question 2"].question == second.question
    before = f"{first.question}{first.prefix} {first.value}.\n{second.question}{second.prefix} {second.value}.\n"
    assert by_task["turns, turn 3"].question == before + third.question
    assert by_task["distance, after 9"].question == f"OTHERTEXT\n{second.question}"  # context 4 asks for needle 4 of 3
    assert by_task["distance, after 0"].question == second.question
    for question in asked:
        assert question.score(f"it is {question.reference}.") == 1 and question.score("12") == 0
    ids = list(range(60))
    assert [Letters()(cut_text(Letters(), ids, 7, place)).input_ids for place in (0, 1)] == [ids[:7], ids[7:14]]
    assert len(Letters()(cut_text(Letters(), ids, 100, 0)).input_ids) == 100


@pytest.fixture(scope="module")
def loaded():
    config = dataclasses.replace(PLAIN, num_layers=1, windows=(None,), context=4096)
    return Loaded(config, model(config).params)


def test_the_likelihood_is_that_of_the_answer_through_the_cache(loaded):
    """Beside a full cache that is prefilled, asked and scored by hand; asking for it changes no answer."""
    context, full, letters = make_context(Letters(), 300, 1, 0, 0), parse_method("full"), Letters()
    (question,) = questions_of(context, 300, 0, ("turns",))
    pair = (question, dataclasses.replace(question, reference=None, index=1))
    found, bare = evaluate(loaded, {"full": full}, Suite("eval test", pair, rows=1, dtype="float32"))
    assert found["prediction"] == bare["prediction"] and found["answer_nll_tokens"] == 8 and "answer_nll" not in bare
    ids = letters(question.context + question.question + question.answer_prefix + question.reference).input_ids
    scored = perplexity(loaded, full, np.asarray([ids]), len(ids) - 8, bases=None, dtype="float32")
    assert found["answer_nll"] == pytest.approx(float(scored.nll.mean()), rel=1e-4)


def test_the_command_records_and_prints(tmp_path, capsys, monkeypatch, loaded):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: loaded)
    (tmp_path / "other.txt").write_text("words of another kind " * 40)
    log = tmp_path / "r.jsonl"
    words = ["eval", "retention", "--lengths", "300", "--turns", "2", "--samples", "1", "--after", "0", "40", "--rows", "1",
             "--between", str(tmp_path / "other.txt"), "--methods", "full", "--json", str(log)]
    assert main(words) == 0
    printed, records = capsys.readouterr().out, read_records(log)
    assert len(records) == 6 == len({record["task"] for record in records}) == 6
    tasks = ("shared, question 2", "turns, turn 1", "distance, after 40")
    assert all(task in printed for task in tasks) and "nats a token" in printed and "x smaller" in printed
    for record in records:
        assert record["command"] == "eval retention" and record["between"]["name"].endswith("other.txt") and record["turns"] == 2
        assert 0 <= record["score"] <= 100 and 0 < record["answer_nll"] < 20 and 0 <= record["needle_depth"] <= 1
        json.dumps(record, allow_nan=False)
    after = {record["task"]: record["question_tokens"] for record in records}
    assert after["distance, after 40"] == after["distance, after 0"] + 41
    more = [{**record, "index": 1, "answer_nll": record["answer_nll"] + 2} for record in records]
    nats, task = mean_nll(records + more)["full"], "turns, turn 2"
    assert nats[300, task] == pytest.approx(next(r["answer_nll"] for r in records if r["task"] == task) + 1)
    assert mean_nll([*records, {**records[0], "answer_nll": None}])["full"][300, records[0]["task"]] is None
    assert main(words) == 0 and len(read_records(log)) == len(records)  # nothing is computed again


def test_numbers_that_cannot_be(loaded):
    full = parse_methods(["full"])
    for given, words in (({"turns": 0}, "turns=0: must be at least 1"), ({"after": (-1,)}, "after=-1: must be at least 0"),
                         ({"modes": ("all",)}, "modes=('all',): allowed are shared, turns, distance"),
                         ({"modes": ()}, "allowed are"), ({"lengths": (5000,)}, "length=5000: is more than the model's context"),
                         ({"after": (0, 10**8)}, "after=100000000: is more than the model's context of 4096 tokens"),
                         ({"lengths": (4000,), "samples": 1}, "are more than the model's context of 4096")):
        with pytest.raises(ValueError) as caught:
            evaluate_retention(loaded, full, **given)
        assert words in str(caught.value)
