"""Records by the table: a field that is changed, and words of what is said about it; data files of the evaluations."""

import json

import pytest
from refusing import refused

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.lm_harness.tasks import check_lines
from lowrank_kv_jax.evals.longbench.samples import load_samples
from lowrank_kv_jax.evals.results.resume import KEY, finished
from lowrank_kv_jax.evals.ruler.qa import load_questions
from lowrank_kv_jax.evals.ruler.samples import load_task

SCORED = {"command": "c", "model": "m", "method": "full", "task": "t", "length": 8, "index": 0, "score": 1.0}
NLL = {"command": "c", "model": "m", "method": "full", "task": "t", "length": 8, "index": 0, "nll": 1.0, "scored_tokens": 4,
       "text": {"name": "x"}}
NUMBER, NAME = "that is no finite number of at most 1e+15", "that is no text, and no number"

LEFT_OUT = (
    (SCORED, {"score": "x"}, f"a score {NUMBER}"), (SCORED, {"score": [1]}, f"a score {NUMBER}"), (SCORED, {"score": True}, "a score"),
    (SCORED, {"score": 10**400}, f"a score {NUMBER}"), (SCORED, {"score": 1e300}, f"a score {NUMBER}"),
    (SCORED, {"index": {}}, f"a index {NAME}"), (SCORED, {"length": [8]}, f"a length {NAME}"), (SCORED, {"length": 10**400}, "a length"),
    (SCORED, {"depth": [0]}, f"a depth {NAME}"), (SCORED, {"seed": 1e300}, f"a seed {NAME}"),
    (SCORED, {"command": 5}, "a command, model or protocol that is no text"), (SCORED, {"model": {}}, f"a model {NAME}"),
    (SCORED, {"protocol": 5}, "a command, model or protocol that is no text"), (SCORED, {"method": 5}, "a method or a task that is no text"),
    (SCORED, {"task": ["t"]}, "a method or a task that is no text"), (SCORED, {"cache_bytes": "x"}, f"a cache_bytes {NUMBER}"),
    (SCORED, {"bytes_per_token": 10**400}, f"a bytes_per_token {NUMBER}"), (SCORED, {"ttft_s": {}}, f"a ttft_s {NUMBER}"),
    (SCORED, {"context_tokens": "x"}, f"a context_tokens {NUMBER}"), (SCORED, {"rows": []}, "rows that are no whole number"),
    (SCORED, {"rows": "4"}, "rows that are no whole number"), (SCORED, {"prompt_sha256": {}}, "a sha256 that is no text"),
    (NLL, {"nll": "x"}, f"a nll {NUMBER}"), (NLL, {"nll": -1e300}, f"a nll {NUMBER}"), (NLL, {"text": 5}, "the name of its text"),
    (NLL, {"text": {"name": []}}, "a text whose name or sha256 is no text"), (NLL, {"text": {"sha256": 5}}, "a text whose name or sha256"),
    (NLL, {"scored_tokens": -1}, "scored_tokens that are no number above 0"), (NLL, {"scored_tokens": "x"}, "scored_tokens that are no"),
    (NLL, {"step": []}, f"a step {NAME}"), (NLL, {"seed": {}}, f"a seed {NAME}"), (NLL, {"index": None}, "without the index"),
)


@pytest.mark.parametrize("base, change, words", LEFT_OUT, ids=lambda value: str(value)[:40])
def test_a_report_says_which_records_it_leaves_out(base, change, words, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(base | change) + "\n" + json.dumps(base) + "\n")
    assert main(["report", str(path)]) == 0
    assert f"{path}: records left out: 1 with {words}" in (said := capsys.readouterr().err) or words in said
    path.write_text(json.dumps(base | change) + "\n")
    assert main(["report", str(path)]) == 2
    assert "no record with a score or a likelihood" in capsys.readouterr().err


@pytest.mark.parametrize("line", ("[]", "5", "{", "{\"score\": NaN}", "[" * 10_000, "{\"a\": " + "[" * 70 + "]" * 70 + "}", "\0", "9" * 5000),
                         ids=lambda text: text[:12])
def test_lines_that_hold_no_record_are_counted(line, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n" + json.dumps(SCORED) + "\n")
    assert main(["report", str(path)]) == 0
    assert f"{path}: lines skipped that hold no record: 1, the first is line 1" in capsys.readouterr().err


@pytest.mark.parametrize("change", (
    {}, {"cache_bytes": 8}, {"cache_bytes": 8, "full_cache_bytes": 16}, {"full_cache_bytes": 16, "bytes_per_token": 1},
))
def test_a_report_takes_perplexities_without_bytes(change, tmp_path, capsys):
    other = {"method": "ojakv"} | change
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(NLL | extra) + "\n" for extra in ({}, other)) + '{"cut')
    assert main(["report", str(tmp_path / "x.jsonl")]) == 0
    assert "ojakv" in capsys.readouterr().out


def test_a_first_record_that_was_cut_off_keeps_no_run_from_going_on(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"command": "eval')
    assert finished(tmp_path / "x.jsonl", {}) == {}


@pytest.mark.parametrize("change, words", (
    ({"score": None}, "has neither a score nor a likelihood"), ({"score": "x"}, "score='x': must be a number of at most 1e+15"),
    ({"score": 10**400}, "must be a number of at most 1e+15"), ({"cache_bytes": []}, "cache_bytes=[]: must be a number"),
    ({"score": None, "nll": 1.0, "scored_tokens": -4}, "has neither a score nor a likelihood"),
    ({"style": "chat"}, "style was 'chat' and is now 'base'"), ({"style": ["x"] * 9999}, "style was ['x', 'x'"),
))
def test_a_run_is_not_resumed_from_damage(change, words, tmp_path):
    record = dict.fromkeys((*KEY, "versions")) | {"method": "full", "task": "t", "index": 0, "score": 1.0, "style": "base"} | change
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record | {"index": [0]}) + "\n")
    key = tuple(record[field] for field in KEY)
    refused(lambda: finished(tmp_path / "x.jsonl", {key: {"style": "base"}}), "x.jsonl", words)


# ---- data files: what reads them, their content, and words ----------------------------------------------------------


def ruler(path):
    return load_task(path, "niah_single_1", 100)


def longbench(path):
    return load_samples("hotpotqa", path.rename(path.with_name("hotpotqa.jsonl")).parent)


def squad(path):
    return load_questions("squad", path)


def piqa(path):
    return check_lines(path, "piqa")


DATA = (
    (ruler, "", "holds no sample"), (ruler, "[]", "line 1: expected an object with the fields input"), (ruler, "{", "line 1: "),
    (ruler, "[" * 10_000, "line 1: nested too deeply"), (ruler, {"input": "x"}, "line 1: the field 'outputs' is missing"),
    (ruler, {"input": 5, "outputs": ["x"]}, "line 1: input=5: expected a string"),
    (ruler, {"input": "x", "outputs": []}, "outputs=[]: expected a list of at least one string"),
    (ruler, {"input": "x", "outputs": ["y"], "length": 0}, "length=0: expected a number of tokens"),
    (ruler, {"input": "x", "outputs": ["y"], "length": 101}, "length=101: expected at most the 100 tokens asked for"),
    (ruler, {"input": "x", "outputs": ["y"], "length": 10**30}, "expected at most the 100 tokens asked for"),
    (ruler, {"input": "x", "outputs": ["y"]}, "the input has no question that starts with"),
    (longbench, "", "holds no sample"), (longbench, "5", "line 1: expected an object with the fields of LongBench, got int"),
    (longbench, "[" * 10_000, "line 1: nested too deeply"), (longbench, {"context": "x"}, "line 1: the field 'input' is missing"),
    (longbench, {"context": 5, "input": "x", "answers": ["y"]}, "context=5: expected a string"),
    (longbench, {"context": "x", "input": "x", "answers": "y"}, "answers='y': expected a list of at least one string"),
    (longbench, {"context": "x", "input": "x", "answers": ["y"], "all_classes": 5}, "all_classes=5: expected"),
    (squad, "", "not a squad file of the form that RULER reads"), (squad, "[]", "not a squad file"), (squad, '{"data": 5}', "not a squad file"),
    (squad, "[" * 100_000, "nested too deeply"), (squad, {"data": [{"paragraphs": [{}]}]}, "not a squad file"),
    (piqa, "", "holds no document"), (piqa, "5", "line 1: expected an object with the fields goal"), (piqa, "[" * 10_000, "line 1: nested"),
    (piqa, {"goal": "x", "sol1": "y"}, "line 1: the field 'sol2' is missing"),
    (piqa, {"goal": "x", "sol1": "y", "sol2": "z", "label": 2}, "label=2: expected a number in 0..1"),
    (piqa, {"goal": " ", "sol1": "y", "sol2": "z", "label": 0}, "goal=' ': expected a string that is not empty"),
)


@pytest.mark.parametrize("read, content, words", DATA, ids=lambda value: getattr(value, "__name__", str(value)[:40]))
def test_data_files(read, content, words, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    refused(lambda: read(path), ".jsonl", words)


@pytest.mark.parametrize("read", (ruler, squad))
def test_a_device_is_never_read(read):
    from pathlib import Path

    refused(lambda: read(Path("/dev/zero")), "/dev/zero: ", "is a character device")
