"""RULER's tasks, sample by sample against the output of the official generator."""

import json
import random
import re

import pytest
from character_tokenizer import Characters
from shared_data import shared

from lowrank_kv_jax.evals import ruler
from lowrank_kv_jax.evals.ruler import cwe, qa
from lowrank_kv_jax.evals.ruler.words import AdjectiveNouns, adjective_nouns
from lowrank_kv_jax.models.gguf_file import read_gguf
from lowrank_kv_jax.models.gguf_tokenizer import build_tokenizer
from lowrank_kv_jax.models.load import demo_model_path

ELEVEN = ruler.GROUPS["ruler-11"]
HELD = [(length, task) for length in (1024, 2048, 4096) for task in ELEVEN]
HELD_QA = [(2048, "qa_1"), (4096, "qa_1"), (4096, "qa_2")]
LONGER = {"cwe", "niah_multikey_1", "vt"}  # by default of more than the shortest length: words, a haystack of a text, of noise


@pytest.fixture(scope="module")
def tokenizer():
    try:
        return build_tokenizer(read_gguf(demo_model_path()))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def rows_of(length, task):
    text = shared("ruler", str(length), f"{task}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def documents_of(text):
    body = text.split("The following are given documents.\n\n")[1].rpartition("\n\nAnswer the question based")[0]
    return re.split(r"(?:^|\n\n)Document \d+:\n", body)[1:]


# ---- against the official generator ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "task"), [
    case if case[0] == 1024 or case[0] == 2048 and case[1] in LONGER else pytest.param(*case, marks=pytest.mark.slow)
    for case in HELD])
def test_samples_are_those_of_the_official_generator(tokenizer, length, task):
    rows = rows_of(length, task)
    haystack = shared("text", "state_union.txt").read_text(encoding="utf-8")
    samples = ruler.generate(task, tokenizer, length, len(rows), 42, haystack=haystack)
    for sample, row in zip(samples, rows, strict=True):
        assert sample.input == row["input"]
        assert sample.answer_prefix == row["answer_prefix"]
        assert list(sample.outputs) == row["outputs"]
        assert sample.length == row["length"] <= length


@pytest.mark.parametrize(("length", "task"), [
    pytest.param(*case, marks=pytest.mark.slow) if case[1] == "qa_1" else case for case in HELD_QA])
def test_qa_prompts_are_built_and_shuffled_as_officially(tokenizer, length, task):
    """The data sets are not here; each sample's own documents, put back in order, give the sample again."""
    rebuilt = 0
    for row in rows_of(length, task):
        shown = documents_of(row["input"])
        order = list(range(len(shown)))
        random.Random(42).shuffle(order)
        documents = tuple(text for _, text in sorted(zip(order, shown, strict=True)))
        # what answers the question comes first, before shuffling
        first = documents[0] if task == "qa_1" else "".join(documents[:10])
        assert any(reference in first for reference in row["outputs"]) or row["outputs"][0].lower() in first.lower()
        if len(shown) < qa.STEP:
            continue  # shortened below the size at which the search starts
        query = row["input"].rpartition("\n\nQuestion: ")[2]
        questions = qa.QuestionSet((qa.Question(query, tuple(row["outputs"]), (0,)),), documents)
        sample, = ruler.generate(task, tokenizer, row["length"], 1, 42, questions=questions)
        assert (sample.input, sample.answer_prefix) == (row["input"], row["answer_prefix"])
        assert (list(sample.outputs), sample.length) == (row["outputs"], row["length"])
        rebuilt += 1
    assert rebuilt >= 4


@pytest.mark.parametrize(("length", "task"), HELD + HELD_QA)
def test_official_files_load_and_split_before_their_question(length, task):
    samples = ruler.load_task(shared("ruler", str(length), f"{task}.jsonl"))
    assert [sample.index for sample in samples] == list(range(len(samples)))
    for sample in samples:
        context, question = ruler.split_context(task, sample.input)
        assert context + question == sample.input
        assert context.endswith("\n") and "\n" not in question and question.strip().endswith(("?", "."))
        assert sample.question == question + sample.answer_prefix


# ---- generation from other inputs --------------------------------------------------------------------------


OTHERWISE = {"cwe", "fwe", "niah_multiquery", "niah_single_1", "niah_single_2", "vt"}  # the others are needles as well


@pytest.mark.parametrize("task", [
    pytest.param(task, marks=[] if task in OTHERWISE else pytest.mark.slow) for task in ELEVEN])
def test_another_seed_and_the_offline_haystack(tokenizer, task):
    samples = ruler.generate(task, tokenizer, 1536, 2, seed=7)
    assert samples == ruler.generate(task, tokenizer, 1536, 2, seed=7)
    assert samples != ruler.generate(task, tokenizer, 1536, 2, seed=8)
    for sample in samples:
        text = sample.input + sample.answer_prefix
        tokens = len(tokenizer(text, add_special_tokens=False).input_ids) + ruler.find_task(task).new_tokens
        assert sample.length is not None and tokens == sample.length <= 1536
        assert all(reference in sample.context for reference in sample.outputs)
        assert ruler.score(task, " ".join(sample.outputs), sample.outputs) == 1


def squad(paragraphs=30):
    texts = [f"Paragraph {i} says that river {i} is {100 + i} miles long. " * 4 for i in range(paragraphs)]
    articles = [texts[:12], texts[12:]]
    return {"data": [{"paragraphs": [{"context": text, "qas": [
        {"question": f"How long is river {texts.index(text)}?", "is_impossible": False,
         "answers": [{"text": str(100 + texts.index(text))}, {"text": "many miles"}]},
        {"question": "What?", "is_impossible": True, "answers": []},
    ]} for text in article]} for article in articles]}


def test_qa_from_squad_prefers_documents_of_the_same_article(tokenizer):
    data = qa.read_squad(squad())
    assert len(data.questions) == 30 and list(data.documents) == sorted(data.documents)
    samples = ruler.generate("qa_1", tokenizer, 1280, 20, questions=data)
    assert max(len(documents_of(sample.input)) for sample in samples) >= 12
    for sample in samples:
        shown = documents_of(sample.input)
        number = int(re.findall(r"river (\d+)", sample.question)[0])
        assert sample.outputs == (str(100 + number), "many miles")
        assert len(set(shown)) == len(shown)
        assert data.documents[data.questions[number].context[0]] in shown
        same = [text for text in shown if (int(text.split()[1]) < 12) == (number < 12)]
        assert len(same) == min(len(shown), 12 if number < 12 else 18)


def test_qa_files_are_read_and_refused(tokenizer, tmp_path):
    hotpot = [{"question": f"q{i}", "answer": f"a{i}",
               "context": [[f"t{i}{j}", ["One. ", f"a{i} two."]] for j in range(10)]} for i in range(12)]
    (tmp_path / "hotpot.json").write_text(json.dumps(hotpot))
    data = qa.load_questions("hotpotqa", tmp_path / "hotpot.json")
    assert len(data.documents) == 120 and data.documents[0] == "t00\nOne. a0 two."
    sample = ruler.generate("qa_2", tokenizer, 512, 1, questions=data)[0]
    assert sum("a0 two" in text for text in documents_of(sample.input)) == 10
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="other.json.*squad"):
        qa.load_questions("squad", tmp_path / "other.json")
    for change, allowed in (({"answer": ""}, "answers=.*none of them empty"), ({"answer": 5}, "answers="), ({"question": " "}, "question=")):
        (tmp_path / "hotpot.json").write_text(json.dumps([hotpot[0] | change]))
        with pytest.raises(ValueError, match=f"hotpot.json.*{allowed}"):  # an empty answer would be found in anything
            qa.load_questions("hotpotqa", tmp_path / "hotpot.json")
    (tmp_path / "none.json").write_text('{"data": []}')
    with pytest.raises(ValueError, match="none.json.*holds no question that has an answer"):
        qa.load_questions("squad", tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"hotpot.json.*expected an object with data\[\]"):
        qa.load_questions("squad", tmp_path / "hotpot.json")
    with pytest.raises(ValueError, match="samples=99.*12 questions"):
        ruler.generate("qa_2", tokenizer, 512, 99, questions=data)


def test_common_words_beyond_the_word_list():
    words = [f"word{i}" for i in range(20000)]
    maker = cwe._Maker(ruler.find_task("cwe"), 8192, 42, words)
    _, common = maker.make(len(maker.words) + 1)
    assert set(common) <= set(words)


def test_pairs_of_words_are_the_sorted_set():
    adjectives, nouns = ["blue", "blue-eyed", "big", "big"], ["eyed-cat", "cat", "zoo", "back-up"]
    pairs = AdjectiveNouns(adjectives, nouns)
    assert list(pairs) == sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    assert pairs[-1] == list(pairs)[-1] and pairs[2:4] == list(pairs)[2:4]
    with pytest.raises(IndexError):
        pairs[len(pairs)]
    assert len(adjective_nouns()) > 6_000_000


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [
    pytest.param(task, marks=[] if task in OTHERWISE or task not in ELEVEN else pytest.mark.slow) for task in ruler.TASKS])
def test_lengths_below_the_floor_are_refused(tokenizer, task):
    dataset = ruler.find_task(task).parameters.get("dataset")
    questions = qa.read_squad(squad()) if dataset else None
    for length in (1, 40, 160, 240):
        with pytest.raises(ruler.TooShort, match=f"length={length} is below the floor of RULER task '{task}'"):
            ruler.generate(task, tokenizer, length, 2, haystack="Word. " * 999, questions=questions)


def test_an_example_that_a_tokenizer_spells_out_is_not_a_length():
    with pytest.raises(ruler.TooShort, match="^RULER task 'vt': its worked example has at most 500 tokens at any length"):
        ruler.generate("vt", Characters(), 4000, 1)


def test_mistakes_are_named(tokenizer):
    with pytest.raises(ValueError, match="unknown RULER task 'niah_singel_1', did you mean 'niah_single_1'"):
        ruler.generate("niah_singel_1", tokenizer, 1024, 1)
    with pytest.raises(ValueError, match="samples=0"):
        ruler.generate("vt", tokenizer, 1024, 0)
    with pytest.raises(ValueError, match="seed=-1"):
        ruler.generate("vt", tokenizer, 1024, 1, seed=-1)
    with pytest.raises(ValueError, match="no text"):
        ruler.generate("niah_single_2", tokenizer, 1024, 1, haystack="  ")
    with pytest.raises(ValueError, match="no question"):
        ruler.split_context("vt", "nothing here")
    assert ruler.expand_tasks(["ruler-6", "vt", "vt"]) == (*ruler.RULER_6, "vt")
    assert len(ruler.expand_tasks(["all"])) == 13


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2"), ("[1]", "line 2: expected an object"), ('{"input": "a"}', "line 2: the field 'outputs'"),
    ('{"input": "x\\nQuestion: a", "outputs": []}', "line 2: outputs"),
    ('{"input": 3, "outputs": ["a"]}', "line 2: input"), ('{"input": "x", "outputs": ["a"]}', "line 2: .*no question"),
    ('{"input": "x\\nQuestion: a", "outputs": ["a"], "length": "5"}', "line 2: length='5'"),
    ('{"input": "x\\nQuestion: a", "outputs": ["a", ""]}', r"vt.jsonl, line 2: outputs=\['a', ''\]: .*none .* empty"),
    ('{"input": "x\\nQuestion: a", "outputs": " "}', "line 2: outputs"),
    ('{"input": "x\\nQuestion: a", "outputs": ["a"], "length": -1}', "line 2: length=-1"),
    ('{"input": "x\\nQuestion: a", "answer_prefix": 1, "outputs": ["a"]}', "line 2: answer_prefix=1"),
])
def test_malformed_files_say_where(tmp_path, line, message):
    path = tmp_path / "vt.jsonl"
    path.write_text('{"index": 0, "input": "x\\nQuestion: y", "outputs": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        ruler.load_task(path)


def test_samples_of_another_length_are_refused(tmp_path):
    path = tmp_path / "vt.jsonl"
    rows = [{"input": "x\nQuestion: y", "outputs": ["a"], "length": length} for length in (200, 990)]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert len(ruler.load_task(path, length=1024)) == len(ruler.load_task(path, length=990)) == 2
    with pytest.raises(ValueError, match="vt.jsonl, line 3: length=990: expected at most the 512 tokens asked for"):
        ruler.load_task(path, length=512)
    with pytest.raises(ValueError, match="vt.jsonl, line 3: the longest sample has length=990, not half of the 4096"):
        ruler.load_task(path, length=4096)


@pytest.mark.parametrize(("length", "task"), HELD + HELD_QA)
def test_official_files_have_their_own_length(length, task):
    path = shared("ruler", str(length), f"{task}.jsonl")
    assert ruler.load_task(path, length=length) == ruler.load_task(path)
    for other in (length // 2, 4 * length):
        with pytest.raises(ValueError, match="tokens asked for"):
            ruler.load_task(path, length=other)


def test_files_keep_samples(tokenizer, tmp_path):
    samples = ruler.generate("vt", tokenizer, 1024, 3)
    ruler.save_task(tmp_path / "vt.jsonl", samples)
    assert ruler.load_task(tmp_path / "vt.jsonl") == samples
    (tmp_path / "fwe.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no sample"):
        ruler.load_task(tmp_path / "fwe.jsonl")
    with pytest.raises(ValueError, match="unknown RULER task 'other'"):
        ruler.load_task(tmp_path / "other.jsonl")


def test_scores():
    assert ruler.score("vt", "the ABC, def", ("abc", "DEF", "ghi", "x y")) == 0.5
    assert ruler.score("qa_1", "the ABC", ("nothing", "abc")) == 1
    assert ruler.score("qa_2", "the ABC", ("nothing",)) == 0
