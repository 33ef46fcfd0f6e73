"""LongBench's prompts, truncation and metrics."""

import json
import re

import pytest
from character_tokenizer import Encoded
from shared_data import shared

from lowrank_kv_jax.evals import longbench
from lowrank_kv_jax.evals.longbench.metrics import complete

TASKS = tuple(longbench.all_tasks())


class Words:
    """A tokenizer of words, each with the white space in front of it."""

    def __init__(self):
        self.words: list[str] = []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = []
        for word in re.findall(r"\s*\S+|\s+$", text):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return Encoded(ids)

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[i] for i in ids)


# What the published scorer gives for these predictions, in percent.
OFFICIAL = [
    ("narrativeqa", "He was the King, of  France!", ["a king of France", "Louis"], (), 75.0),
    ("hotpotqa", "The answer", ["answer"], (), 100.0),
    ("musique", "", ["yes"], (), 0.0),
    ("triviaqa", "\n\nParis\nParis is a city", ["paris", "Lutetia"], (), 100.0),
    ("qmsum", "the cat sat on the mat", ["the cat lay on a mat today"], (), 66.67),
    ("gov_report", "", ["a report"], (), 0.0),
    ("gov_report", ". . .", ["a report"], (), 0.0),
    ("samsum", "Lisa wants to talk. \nDialogue: x", ["Lisa wants Meredith to call."], (), 60.0),
    ("trec", "Type: Other location\nQuestion:", ["Other location"], ("Other location", "City", "location"), 100.0),
    ("trec", "a b c ab abc", ["abc"], ("a", "b", "c", "ab", "abc"), 33.33),
    ("trec", "City", ["Other location"], ("Other location", "City"), 0.0),
    ("passage_count", "There are 12 of 30.", ["12"], (), 50.0),
    ("passage_count", "none", ["12"], (), 0.0),
    ("passage_retrieval_en", "Paragraph 3 or 4, 3", ["Paragraph 3"], (), 66.67),
    ("lcc", "```\n# no\n// no\n    return value\nx", ["    return values"], (), 97.0),
    ("repobench-p", "", ["return"], (), 0.0),
    ("lcc", "int x = 1;", ["float yy = 12;"], (), 58.0),
]


@pytest.mark.parametrize(("task", "prediction", "answers", "classes", "official"), OFFICIAL)
def test_scores_are_the_official_ones(task, prediction, answers, classes, official):
    assert round(100 * longbench.score(task, prediction, answers, classes), 2) == official


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_cut_behind_their_context(task):
    found = longbench.find_task(task)
    context, question = found.split_prompt("CONTEXT {input}", "INPUT {context}")
    assert context.endswith("CONTEXT {input}")
    assert context + question == found.prompt.format(context="CONTEXT {input}", input="INPUT {context}")
    assert question


LONG = ("gov_report", "hotpotqa", "musique", "narrativeqa", "triviaqa")  # shorter ones share their metrics


@pytest.mark.parametrize("task", [
    pytest.param(task, marks=pytest.mark.slow) if task in LONG else task
    for task in TASKS])
def test_published_samples_score_their_own_answers(task):
    samples = longbench.load_samples(task, shared("longbench"))
    assert [sample.index for sample in samples] == list(range(len(samples)))
    for sample in samples:
        answer = sample.answers[0]
        assert longbench.score(task, answer, sample.answers, sample.classes) > 0.99
        question = longbench.make_question(Words(), sample, 400)
        assert question.details["truncated"] == (len((question.context + question.question).split()) < len(
            "".join(longbench.find_task(task).split_prompt(sample.context, sample.question)).split()
        ))
        assert (question.style == "base") == (task in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"))
        assert question.nonempty == (task == "samsum")


def test_the_middle_is_cut_out():
    tokenizer = Words()
    context, question = " ".join(f"c{i}" for i in range(100)) + "\n", "what is it?"
    assert longbench.truncate(tokenizer, context, question, 200) == (context, question, False)
    first, last, cut = longbench.truncate(tokenizer, context, question, 21)
    assert cut and last == question
    assert first == "".join([*(f"c{i} " for i in range(10)), *(f"c{i} " for i in range(93, 100))]).rstrip() + "\n"
    first, last, cut = longbench.truncate(tokenizer, context, question, 4)
    assert cut and first + last == "c0 c1 is it?"


@pytest.mark.parametrize(("task", "fields", "message"), [
    ("qasper", {"all_classes": 5}, "line 1: all_classes=5: expected a list of at least one string"),
    ("qasper", {"all_classes": "x y z"}, "line 1: all_classes='x y z': expected a list"),
    ("qasper", {"context": 5}, "line 1: context=5: expected a string"),
    ("trec", {"all_classes": None}, "line 1: all_classes=None: expected a list"),
    ("trec", {"all_classes": []}, r"line 1: all_classes=\[\]: expected a list"),
    ("trec", {"all_classes": ["City", ""]}, "line 1: all_classes=.*none of them empty"),
    ("passage_retrieval_en", {"answers": ["Paragraph 3", "none"]}, "line 1: answers=.*'none'.*Paragraph N, its number"),
    ("passage_count", {"answers": ["many"]}, r"line 1: answers=\['many'\]: expected a number"),
])
def test_what_cannot_be_scored_is_refused_when_it_is_read(tmp_path, task, fields, message):
    row = {"context": "c", "input": "q", "answers": ["a"], "all_classes": None} | fields
    (tmp_path / f"{task}.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"{task}.jsonl, {message}"):
        longbench.load_samples(task, tmp_path)


def test_what_ends_an_answer_early():
    assert not complete("triviaqa", "\nParis") and complete("triviaqa", "\nParis\n")
    assert not complete("lcc", "# comment\nreturn") and complete("lcc", "# comment\nreturn\n")
    assert not complete("gov_report", "a\nb\n")


def test_mistakes_are_named(tmp_path):
    good = {"context": "c", "input": "q", "answers": ["a"], "all_classes": None, "_id": "1"}
    path = tmp_path / "qasper.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good | {"answers": "a"}) + "\n")
    assert len(longbench.load_samples("qasper", tmp_path, 1)) == 1
    with pytest.raises(ValueError, match=r"qasper.jsonl, line 3: answers"):
        longbench.load_samples("qasper", tmp_path)
    path.write_text(json.dumps({"context": "c"}))
    with pytest.raises(ValueError, match="line 1: the field 'input' is missing"):
        longbench.load_samples("qasper", tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no sample"):
        longbench.load_samples("qasper", tmp_path)
    path.write_bytes(json.dumps(good).encode() + b"\n" + json.dumps(good).encode().replace(b'"q"', b'"\xff"'))
    with pytest.raises(ValueError, match="qasper.jsonl, line 2: .*can't decode byte 0xff"):
        longbench.load_samples("qasper", tmp_path)
    assert len(longbench.load_samples("qasper", tmp_path, 1)) == 1
    with pytest.raises(FileNotFoundError, match="has no trec.jsonl, but qasper"):
        longbench.load_samples("trec", tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        longbench.load_samples("trec", tmp_path / "none")
    with pytest.raises(ValueError, match="unknown LongBench task 'trecc', did you mean 'trec'"):
        longbench.find_task("trecc")
    with pytest.raises(ValueError, match="samples=0"):
        longbench.load_samples("qasper", tmp_path, 0)
