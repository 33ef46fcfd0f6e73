"""Running benchmarks: protocols, shared prefills, records, and going on after an interruption."""

import dataclasses
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import PLAIN
from suites import METHODS, Letters, Loaded, fit, questions, some, without_times

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.cli.eval.options import print_scores
from lowrank_kv_jax.evals import longbench, ruler
from lowrank_kv_jax.evals.asking import answer as answers
from lowrank_kv_jax.evals.asking import ask, few_at_a_time, suite
from lowrank_kv_jax.evals.asking.batches import coarse, make_batches, one_shape
from lowrank_kv_jax.evals.asking.clock import PrefillClock
from lowrank_kv_jax.evals.asking.prompts import Question, chat_parts, encode
from lowrank_kv_jax.evals.asking.suite import Suite, evaluate
from lowrank_kv_jax.evals.needle.grid import evaluate_needles
from lowrank_kv_jax.evals.report import markdown, page, read_report, read_sections
from lowrank_kv_jax.evals.report.figures import _families, draw_figures, draw_needles, pareto_front
from lowrank_kv_jax.evals.report.statistics import Interval, interval, wilcoxon_p
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.results.resume import KEY, key_of
from lowrank_kv_jax.methods.parse import parse_method

TESTS = Path(__file__).parents[2]
PATHS = os.pathsep.join((str(TESTS.parent), str(TESTS)))


@pytest.fixture(scope="module")
def whole():
    return evaluate(Loaded(), METHODS, some(), bases=fit)


# ---- one run -----------------------------------------------------------------------------------------------


def test_every_question_gets_one_record_for_each_method(whole):
    assert [(r["task"], r["index"], r["method"]) for r in whole] == [
        (q.task, q.index, spec) for q in some().questions for spec in METHODS
    ]
    for record in whole:
        assert record["command"] == "eval test" and record["protocol"] == "query-agnostic"
        assert 0 <= record["score"] <= 100 and record["answer_tokens"] <= 4
        assert record["cache_bytes"] == sum(record["bytes_by_kind"].values())
        assert record["context_tokens"] > 16 and record["question_tokens"] == len("question 0?")
        json.dumps(record, allow_nan=False)


def test_sharing_changes_no_answer(whole):
    """Alone, a question on a context of its own batch is answered as among all others."""
    for question in some().questions[:3]:
        alone = Suite("eval test", (question,), rows=1, seed=1)
        for record in evaluate(Loaded(), METHODS, alone, bases=fit):
            match, = (r for r in whole if r["prompt_sha256"] == record["prompt_sha256"]
                      and r["method"] == record["method"])
            assert match["prediction"] == record["prediction"]


def test_drafts_of_the_full_cache_change_no_record_but_its_times(whole, tmp_path):
    drafting, file = dataclasses.replace(some(), draft=True), tmp_path / "records.jsonl"
    evaluate(Loaded(), {"full": METHODS["full"]}, drafting, json=file)
    drafted = evaluate(Loaded(), METHODS, drafting, json=file, bases=fit)  # full answers again, and is recorded once
    assert without_times(drafted) == without_times(whole) and len(read_records(file)) == len(whole)
    assert all(r["ttft_s"] is None for r in drafted if r["method"] != "full")
    without = {spec: method for spec, method in METHODS.items() if spec != "full"}
    with pytest.raises(ValueError, match="draft=True: needs `full` among the methods"):
        evaluate(Loaded(), without, dataclasses.replace(some(), draft=True), bases=fit)


def test_one_prefill_serves_all_questions_and_methods(monkeypatch):
    prefilled = []
    original = ask.prefill_many

    def counted(methods, config, params, tokens, *args, **kwargs):
        prefilled.append((len(methods), tokens.shape[0]))
        return original(methods, config, params, tokens, *args, **kwargs)

    monkeypatch.setattr(ask, "prefill_many", counted)
    asked = questions(6)
    evaluate(Loaded(), METHODS, Suite("eval test", asked, rows=3), bases=fit)
    assert prefilled == [(len(METHODS), 3)]  # 6 questions on 3 contexts


def test_times_are_of_a_method_alone_once_it_is_compiled():
    """Layers that were run twice for another method say nothing about one that reads the prompt once."""
    methods = {spec: METHODS.get(spec) or parse_method(spec) for spec in ("full", "kvzip:keep=0.5")}
    asked = tuple(dataclasses.replace(q, context="context " * 5 + str(q.index)) for q in questions(4, new_tokens=3))
    records = evaluate(Loaded(), methods, Suite("eval test", asked, rows=2), bases=fit)
    assert [r["ttft_s"] is not None for r in records] == [False] * 4 + [False, True] * 2
    records = evaluate(Loaded(), {"full": methods["full"]}, Suite("eval test", asked, rows=2), bases=fit)
    assert [r["ttft_s"] is not None for r in records] == [False, False, True, True]
    assert all((r["decode_tokens_per_s"] is None) == (r["ttft_s"] is None) for r in records)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are only told on Linux")
def test_programs_are_dropped_before_maps_run_out(monkeypatch, whole):
    """Nothing but times changes; a batch after that is compiled anew and has none."""
    dropped = []
    monkeypatch.setattr(few_at_a_time, "drop_programs", lambda: dropped.append(1))
    monkeypatch.setattr(few_at_a_time, "MOST_MAPS", 10)
    again = evaluate(Loaded(), METHODS, some(), bases=fit)
    assert without_times(again) == without_times(whole) and all(r["ttft_s"] is None for r in again)
    assert len(dropped) >= 2 * len(METHODS)
    monkeypatch.setattr(few_at_a_time, "MOST_MAPS", 10**9)
    dropped.clear()
    evaluate(Loaded(), METHODS, some(), bases=fit)
    assert not dropped


def test_a_prefill_clock_adds_up(monkeypatch):
    times = iter([0.0, 2.0, 2.0, 3.0, 3.0, 7.0, 10.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = PrefillClock()
    for name in ("a", "b"):
        with clock.layer():
            pass
        with clock.method(name):
            pass
    assert (clock.alone("a"), clock.alone("b"), clock.alone("c")) == (7.0, 7.0, 6.0)


def test_both_protocols_agree_with_the_full_cache():
    only = {"full": METHODS["full"]}
    both = [evaluate(Loaded(), only, some(p)) for p in ("query-agnostic", "query-aware")]
    assert [r["prediction"] for r in both[0]] == [r["prediction"] for r in both[1]]
    assert both[1][0]["question_tokens"] == 1


def test_answers_end_at_their_own_limit_or_when_complete(whole):
    assert {r["answer_tokens"] for r in whole if r["task"] == "b"} == {3}
    ending = [dataclasses.replace(q, complete=lambda answer: len(answer) >= 2) for q in questions(2)]
    records = evaluate(Loaded(), {"full": METHODS["full"]}, Suite("eval test", tuple(ending), rows=2))
    assert {r["answer_tokens"] for r in records} == {2}


def test_the_first_token_of_some_answers_can_not_end_them(whole):
    """Neither the end of the sequence nor a line break, in the rows that ask for it; later tokens can."""
    first = {ord(r["prediction"][0]) - 64 for r in whole if r["method"] == "full"}
    ending = Loaded(dataclasses.replace(PLAIN, eos_ids=tuple(first)))
    asked = tuple(dataclasses.replace(q, nonempty=q.index % 2 == 0) for q in questions(4))
    records = evaluate(ending, {"full": METHODS["full"]}, Suite("eval test", asked, rows=2))
    for question, record in zip(asked, records, strict=True):
        assert bool(record["prediction"]) == question.nonempty
        assert not record["prediction"] or ord(record["prediction"][0]) - 64 not in first | {ord("\n")}


def test_batches_have_few_shapes():
    many = [dataclasses.replace(q, index=i, context="x" * (100 + 3 * i)) for i, q in enumerate(questions(40))]
    batches = make_batches(Letters(), many, "query-agnostic", "base", 4, 512)
    assert len({(b.width, b.capacity) for b in batches}) <= 3
    assert sum(len(b.all_questions) for b in batches) == 40
    assert all(len(b.contexts) == 4 and b.capacity <= 512 for b in batches)
    assert [coarse(n) for n in (1, 65, 512, 513, 850, 1025)] == [64, 128, 512, 640, 896, 1280]
    with pytest.raises(ValueError, match="more than the model's context of 128"):
        make_batches(Letters(), many, "query-agnostic", "base", 4, 128)
    for multiple, rows in ((1, 3), (2, 4)):  # no more rows than contexts, but for a mesh
        (batch,) = make_batches(Letters(), many[:3], "query-agnostic", "base", 10**6, 512, multiple=multiple)
        assert len(batch.contexts) == rows and len(batch.all_questions) == 3


def test_one_shape_holds_all_contexts_in_order():
    asked = questions(10)
    batches = make_batches(Letters(), asked, "query-agnostic", "base", 3, 512, one_shape)
    longest = max(len(q.context) for q in asked)
    assert [q.index for b in batches for q in b.all_questions] == list(range(10))
    (width, capacity), = {(b.width, b.capacity) for b in batches}
    assert longest <= width < longest + 64 and capacity == width + 32
    (small, most), = set(one_shape({(1,) * 70: 20, (2,) * 20: 40}, 100).values())
    assert small == most == 100  # the model's context


def test_one_shape_answers_alike_and_says_so(tmp_path):
    few = Suite("eval test", questions(6), rows=2, seed=1)
    one = dataclasses.replace(few, shapes="one")
    assert len({(b.width, b.capacity) for b in one.batches(Loaded())}) == 1
    own = {"full": METHODS["full"]}
    records = evaluate(Loaded(), own, one, json=tmp_path / "one.jsonl")
    assert {record["shapes"] for record in records} == {"one"}
    alike = evaluate(Loaded(), own, few)
    assert [r["prediction"] for r in records] == [r["prediction"] for r in alike] and alike[0]["shapes"] is None
    with pytest.raises(ValueError, match="shapes was 'one' and is now None"):
        evaluate(Loaded(), own, few, json=tmp_path / "one.jsonl")
    with pytest.raises(ValueError, match="shapes='three': must be few or one"):
        dataclasses.replace(few, shapes="three")


def test_rows_stay_in_their_batch_on_an_accelerator(monkeypatch):
    asked = tuple(dataclasses.replace(q, new_tokens=2 + 20 * (q.index == 0)) for q in questions(6))
    suite, sizes, step = Suite("eval test", asked, rows=4, shapes="one"), [], answers.decode_step
    monkeypatch.setattr(answers, "decode_step", lambda *args, **kw: sizes.append(len(args[4])) or step(*args, **kw))
    found = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(answers, "platform", lambda platform=platform: platform)
        sizes.clear()
        found[platform] = [r["prediction"] for r in evaluate(Loaded(), {"full": METHODS["full"]}, suite)]
        assert (set(sizes) == {3}) == (platform == "gpu")  # as many as there are contexts
    assert found["cpu"] == found["gpu"]


def test_one_module_asks():
    name = "from lowrank_kv_jax.evals.asking.answer import"
    folder = TESTS.parent / "evals"
    assert [path.name for path in folder.rglob("*.py") if name in path.read_text()] == ["ask.py"]


# ---- going on ----------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", (1, 2, 3))
def test_a_killed_run_loses_and_repeats_nothing(monkeypatch, tmp_path, whole, seed):
    """Killed again and again at random records, some of them half written."""
    rng, path, append = random.Random(seed), tmp_path / "r.jsonl", suite.append_record
    computed = []

    def killed(file, record):
        if rng.random() < 0.2:
            if rng.random() < 0.5:
                with open(file, "ab") as out:
                    line = json.dumps(record).encode()
                    out.write(line[: rng.randrange(1, len(line) - 1)])
            raise Killed
        append(file, record)
        computed.append(tuple(record[field] for field in KEY))

    monkeypatch.setattr(suite, "append_record", killed)
    runs, records = 0, None
    while records is None:
        runs += 1
        try:
            records = evaluate(Loaded(), METHODS, some(), json=path, bases=fit)
        except Killed:
            assert runs < 60
    assert runs > 1
    assert len(computed) == len(set(computed)) == len(whole)
    assert len(read_records(path)) == len(whole)
    assert without_times(records) == without_times(whole)


def test_a_finished_run_computes_nothing(monkeypatch, tmp_path, whole):
    path = tmp_path / "r.jsonl"
    evaluate(Loaded(), METHODS, some(), json=path, bases=fit)
    before = path.read_bytes()

    def never(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr(ask, "prefill_many", never)
    records = evaluate(Loaded(), METHODS, some(), json=path, bases=never)
    assert without_times(records) == without_times(whole) and path.read_bytes() == before


def test_results_of_another_run_are_refused(tmp_path):
    path, only = tmp_path / "r.jsonl", {"full": METHODS["full"]}
    evaluate(Loaded(), only, some(count=1, haystack="a"), json=path)
    with pytest.raises(ValueError, match="another run .haystack was 'a' and is now 'b'.*another file"):
        evaluate(Loaded(), only, some(count=1, haystack="b"), json=path)
    other = some(count=1, haystack="a")
    changed = dataclasses.replace(other.questions[0], question="another")
    with pytest.raises(ValueError, match="the prompt of a sample 0 is another one"):
        evaluate(Loaded(), only, dataclasses.replace(other, questions=(changed,)), json=path)
    # other weights, seeds, protocols and methods are other records of the same file
    evaluate(Loaded(fingerprint="g"), only, some(count=1, haystack="b"), json=path)
    assert len(read_records(path)) == 2 * 3


def test_only_calibrated_methods_depend_on_the_calibration(tmp_path):
    """So a file may be filled by runs of other methods, one after the other."""
    path, only = tmp_path / "r.jsonl", {"full": METHODS["full"]}
    coded = {"static-pca:rank=0.5,sinks=4,recent=8": METHODS["static-pca:rank=0.5,sinks=4,recent=8"]}
    evaluate(Loaded(), only, some(count=1, calibration=None), json=path)
    evaluate(Loaded(), only | coded, some(count=1, calibration="a"), json=path, bases=fit)
    assert len(read_records(path)) == 2 * 3
    evaluate(Loaded(), only, some(count=1, calibration="b"), json=path)
    with pytest.raises(ValueError, match="calibration was 'a' and is now 'b'"):
        evaluate(Loaded(), coded, some(count=1, calibration="b"), json=path, bases=fit)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import suites as t
from lowrank_kv_jax.evals.asking.suite import evaluate
evaluate(t.Loaded(), {{"full": t.METHODS["full"]}}, t.some(), json=sys.argv[1])
"""


def test_a_process_that_is_killed_leaves_whole_records(tmp_path, whole):
    path = tmp_path / "r.jsonl"
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(tests=str(TESTS)))
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PATHS, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    process = subprocess.Popen([sys.executable, str(script), str(path)], env=env)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_records(path)
    assert len(kept) >= 4
    records = evaluate(Loaded(), METHODS, some(), json=path, bases=fit)
    assert read_records(path)[: len(kept)] == kept
    assert len(read_records(path)) == len(records) == len(whole)
    assert without_times(records) == without_times(whole)


@pytest.mark.slow
def test_a_mesh_of_eight_devices_gives_the_same_records(whole):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    here = Path(__file__).parent
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64", "PYTHONPATH": PATHS}
    done = subprocess.run([sys.executable, str(here / "sharded_suite.py")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == f"{len(whole)} []"


@pytest.mark.slow
def test_two_processes_give_the_same_records(tmp_path, whole):
    """Each of four devices; a mesh over all eight, batch and heads cut across the processes; one file of records."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
    here, path = Path(__file__).parent, tmp_path / "r.jsonl"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "64", "PYTHONPATH": PATHS}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(here / "distributed_suite.py")]
    outputs = [open(tmp_path / f"{i}.log", "w") for i in range(2)]
    running = [subprocess.Popen([*command, str(i), address, str(path)], env=env, stdout=out, stderr=out)
               for i, out in enumerate(outputs)]
    try:
        codes = [process.wait(300) for process in running]
    finally:
        for process, out in zip(running, outputs, strict=True):
            process.kill()
            process.wait()
            out.close()
    assert codes == [0, 0], (tmp_path / "0.log").read_text()[-3000:]
    differ = ("device",)
    found = {key_of(record): record for record in read_records(path)}
    assert len(found) == len(read_records(path)) == len(whole)
    for one, other in zip(without_times([found[key_of(r)] for r in whole]), without_times(whole), strict=True):
        assert {name: one[name] for name in one if name not in differ} == {
            name: other[name] for name in other if name not in differ}


# ---- prompt styles -----------------------------------------------------------------------------------------


class Chatting(Letters):
    chat_template = "there is one"

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        return f"<user>{turns[0]['content'].strip()}</user><model>"


def test_chat_prompts_are_cut_behind_the_context():
    question = Question("a", 1, 0, " the context\n", "what?", " It is", 3, lambda answer: 0.0)
    assert chat_parts(Chatting(), question) == ("<user>the context\n", "what?</user><model> It is")
    head, tail = encode(Chatting(), question, "query-aware", "chat")
    assert len(head) + len(tail) == len("<user>the context\nwhat?</user><model> It is") and len(tail) == 1
    base = dataclasses.replace(question, style="base")
    assert len(encode(Chatting(), base, "query-agnostic", "chat")[0]) == len(" the context\n")
    with pytest.raises(ValueError, match="no chat template"):
        evaluate(Loaded(), METHODS, dataclasses.replace(some(), style="chat"), bases=fit)


def test_impossible_conditions_are_refused():
    for change, message in (({"protocol": "agnostic"}, "protocol='agnostic'"), ({"style": "x"}, "style='x'"),
                            ({"rows": 0}, "rows=0"), ({"questions": ()}, "nothing to ask")):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(some(), **change)
    with pytest.raises(ValueError, match="no tokenizer"):
        evaluate(Loaded(tokenizer=None), METHODS, some())


# ---- benchmarks --------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"index": 0, "input": f"VAR A{i} = {i}\nQuestion: Find {i}.", "answer_prefix": " Answer: ",
             "outputs": [f"A{i}"], "length": 60 + i} for i in range(3)]
    (folder / "vt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_ruler_from_files(files, tmp_path):
    only = {"full": METHODS["full"]}
    records = ruler.evaluate_ruler(Loaded(), only, ["vt"], data=files, json=tmp_path / "r.jsonl", rows=2)
    assert [(r["task"], r["length"], r["index"], r["command"]) for r in records] == [
        ("vt", 62, i, "eval ruler") for i in range(3)
    ]
    assert len(ruler.evaluate_ruler(Loaded(), only, ["vt"], [64], 2, data=files, rows=2)) == 2
    with pytest.raises(ValueError, match="vt.jsonl, line 3: the longest sample has length=62, not half of the 512"):
        ruler.evaluate_ruler(Loaded(), only, ["vt"], [512], data=files)
    (files / "128").mkdir()
    (files / "128" / "vt.jsonl").write_text((files / "vt.jsonl").read_text())
    assert {r["length"] for r in ruler.evaluate_ruler(Loaded(), only, ["vt"], data=files, rows=2)} == {128}
    with pytest.raises(FileNotFoundError, match="no samples of length 64, only of 128"):
        ruler.evaluate_ruler(Loaded(), only, ["vt"], [64], data=files)
    with pytest.raises(FileNotFoundError, match="has no fwe.jsonl, but vt"):
        ruler.evaluate_ruler(Loaded(), only, ["fwe"], data=files)
    (files / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty: has no vt.jsonl, nor any other .jsonl file"):
        ruler.evaluate_ruler(Loaded(), only, ["vt"], data=files / "empty")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ruler.evaluate_ruler(Loaded(), only, ["vt"], data=files / "none")


def test_lengths_beyond_the_context_are_refused_before_samples_are_drawn(monkeypatch, capsys):
    def never(*args, **kwargs):
        raise AssertionError("drawn")

    monkeypatch.setattr("lowrank_kv_jax.evals.ruler.run.draw_samples", never)
    with pytest.raises(ValueError, match="length=513: is more than the model's context of 512 tokens"):
        ruler.evaluate_ruler(Loaded(), METHODS, ["vt"], [512, 513])
    monkeypatch.setattr("lowrank_kv_jax.evals.needle.grid.evaluate_needles", never)
    monkeypatch.setattr("lowrank_kv_jax.cli.eval.options.load_on_mesh", lambda args: (Loaded(), None))
    assert main(["eval", "needle", "--lengths", "64", "100000"]) == 2
    assert "length=100000: is more than the model's context of 512 tokens" in capsys.readouterr().err


def test_repeated_tasks_and_lengths_count_once(files, tmp_path, monkeypatch, capsys):
    assert len(ruler.evaluate_ruler(Loaded(), {"full": METHODS["full"]}, ["vt", "vt"], [64, 64], data=files)) == 3
    row = {"context": "some text", "input": "what?", "answers": ["a"], "all_classes": ["a", "b"]}
    for task in ("trec", "lcc"):
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("lowrank_kv_jax.cli.eval.options.load_on_mesh", lambda args: (Loaded(), None))
    shown: list[Any] = []
    monkeypatch.setattr("lowrank_kv_jax.cli.eval.options.print_scores", lambda *args: shown.append(args[2]))
    argv = ["--tasks", "trec", "trec", "lcc", "--data", str(tmp_path), "--max-length", "200", "--methods", "full"]
    assert main(["eval", "longbench", *argv]) == 0
    assert shown == [{"mean": ["trec", "lcc"]}]


@pytest.mark.slow
def test_needles_at_every_depth(tmp_path):
    long = dataclasses.replace(PLAIN, context=2048)
    only = {"full": METHODS["full"]}
    records = evaluate_needles(Loaded(long), only, [512, 640], 3, 2, json=tmp_path / "r.jsonl")
    assert [(r["length"], r["depth"]) for r in records] == [
        (length, depth) for length in (512, 640) for depth in (0.0, 0.5, 1.0) for _ in range(2)
    ]
    draw_needles(records, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="depths=1"):
        evaluate_needles(Loaded(long), only, depths=1)


def test_longbench_from_files(tmp_path):
    row = {"context": "some text " * 30, "input": "what?", "answers": ["a", "b"], "all_classes": None}
    for task in ("hotpotqa", "triviaqa"):
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
    only, tasks = {"full": METHODS["full"]}, ["hotpotqa", "triviaqa"]
    records = longbench.evaluate_longbench(
        Loaded(), only, tasks, data=tmp_path, max_length=200, json=tmp_path / "r.jsonl"
    )
    assert [(r["task"], r["length"], r["truncated"]) for r in records] == [(task, 200, True) for task in tasks]
    with pytest.raises(ValueError, match="max_length=1000: must lie in 2..512"):
        longbench.evaluate_longbench(Loaded(), only, tasks, data=tmp_path, max_length=1000)


@pytest.mark.parametrize(("argv", "message"), [
    (["ruler", "--tasks", "niah"], "unknown RULER task 'niah'"),
    (["ruler", "--methods", "ful"], "unknown method 'ful', did you mean 'full'"),
    (["ruler", "--samples", "0"], "--samples 0: must be at least 1"),
    (["ruler", "--json", "/nowhere/r.jsonl"], "/nowhere/r.jsonl"),
    (["longbench", "--tasks", "x"], "unknown LongBench task 'x'"),
])
def test_mistakes_on_the_command_line_take_one_line(capsys, argv, message):
    assert main(["eval", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lowrank-kv: error: ") and error.count("\n") == 1 and message in error


def test_scores_are_printed_with_averages(whole, capsys):
    print_scores(whole, "made up", {"both": ["a", "b"], "more": ["a", "c"]})
    out = capsys.readouterr().out
    a, b, both = (float(next(line for line in out.split("\n") if line.startswith(f"│ {name} ")).split("│")[2])
                  for name in ("a", "b", "both"))
    assert both == pytest.approx((a + b) / 2, abs=0.1) and "more" not in out and "x smaller" in out


# ---- report ------------------------------------------------------------------------------------------------


def test_report_of_a_run(tmp_path, whole, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in whole))
    section, = read_sections([path])
    assert section.samples == 7 and section.tasks == ("a", "b") and section.baseline == "full"
    full, *others = section.entries
    assert full.difference is None and all(entry.difference is not None for entry in others)
    for mean in (entry.mean for entry in section.entries):
        assert mean.low is not None and mean.high is not None and mean.low <= mean.mean <= mean.high
    text = markdown([section])
    assert text.count("\n| `") == len(METHODS) and "vs full" in text
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert text in capsys.readouterr().out
    html = (tmp_path / "out" / "report.html").read_text()
    assert html.count("data:image/png;base64,") == len(list((tmp_path / "out").glob("*.png"))) >= 2
    assert "src=\"http" not in html and "eval test, tiny, 64 tokens, query-agnostic" in html
    assert main(["report", str(tmp_path / "none")]) == 2
    path.write_text('{"a": 1}\n')
    assert main(["report", str(path)]) == 2 and "no record with a score or a likelihood" in capsys.readouterr().err


def test_report_maps_needles_and_survives_odd_names(tmp_path):
    path = tmp_path / "r.jsonl"
    rows = [{"command": "eval needle", "model": "<m&m>", "method": method, "task": "niah", "length": length,
             "depth": depth, "index": 0, "seed": 0, "protocol": None, "score": 50.0, "ttft_s": 1.0,
             "cache_bytes": 10, "full_cache_bytes": 20, "bytes_per_token": 5.0}
            for method in ("full", "a|b") for length in (64, 128) for depth in (0.0, 0.5, 1.0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = read_sections([path])
    figures = draw_figures(sections, tmp_path)
    assert {file.name for entries in figures.values() for _, file in entries} >= {
        "1-needles.png", "1-pareto.png", "2-pareto.png", "2-ttft.png"
    }
    assert "&lt;m&amp;m&gt;" in page(sections, figures, "t") and "<m&m>" not in page(sections, figures, "t")
    assert "`a\\|b`" in markdown(sections)


def test_report_of_perplexities(tmp_path, capsys):
    """Windows of unlike length count by their tokens; the figure and the paired difference are there."""
    path = tmp_path / "r.jsonl"
    rows = [{"command": "eval perplexity", "model": "m", "method": method, "task": "perplexity-stream", "length": 64,
             "step": 32, "text": {"name": "made up"}, "index": i, "nll": nll, "scored_tokens": tokens,
             "cache_bytes": 10, "full_cache_bytes": 20, "bytes_per_token": 5.0, "nominal_smaller": 2.0}
            for method, worse in (("full", 0.0), ("small", 0.5))
            for i, (nll, tokens) in enumerate(((64.0 + 32 * worse, 32), (16.0 + 16 * worse, 16), (8 + 8 * worse, 8)))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section, = read_report([path])
    full, small = section.entries
    assert full.perplexity.mean == pytest.approx(math.exp(88 / 56)) and small.smaller == 2
    assert small.perplexity.mean == pytest.approx(math.exp(88 / 56 + 0.5))
    assert small.difference == Interval(0.5, 0.5, 0.5) and small.p == 0.25
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "nats per token vs full" in capsys.readouterr().out
    assert (tmp_path / "out" / "1-perplexity.png").stat().st_size > 5000
    assert "windows of 64 by 32 tokens" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ValueError, match="no record has the task 'other', only perplexity-stream"):
        read_sections([path], tasks=["other"])


def test_many_methods_share_colours_and_a_map(tmp_path):
    path = tmp_path / "r.jsonl"
    rows = [{"command": "eval test", "model": "m", "method": f"{name}:keep={keep}", "task": task, "length": 64, "index": i,
             "seed": 0, "protocol": None, "score": 50.0 * i, "cache_bytes": 10 * keep, "full_cache_bytes": 20,
             "bytes_per_token": 5.0 * keep}
            for name in "abcd" for keep in (1, 2, 3) for task in ("x", "y") for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = read_sections([path])
    assert _families([entry.method for entry in sections[0].entries]) == {
        name: [3 * i, 3 * i + 1, 3 * i + 2] for i, name in enumerate("abcd")}
    names = {file.name for entries in draw_figures(sections, tmp_path).values() for _, file in entries}
    assert names == {"1-pareto.png", "1-tasks.png"}


def test_statistics():
    import numpy as np

    same = interval([np.full(8, 3.0), np.full(4, 5.0)])
    assert (same.mean, same.low, same.high) == (4.0, 4.0, 4.0)
    wide = interval([np.array([0.0, 100.0] * 10)])
    assert wide.low is not None and wide.high is not None
    assert wide.mean == 50 and 20 < wide.low < 40 < 60 < wide.high < 80
    assert interval([np.array([1.0])]).low is None
    assert wilcoxon_p(np.zeros(5)) == 1 and wilcoxon_p(np.array([1.0])) is None
    clear = wilcoxon_p(np.arange(1.0, 11))
    assert clear is not None and clear < 0.01
    assert wilcoxon_p(np.full(3, -100.0)) == 0.25  # ties: every sign pattern of three equal ranks
    assert pareto_front([(1, 1), (2, 0), (3, 5), (1, 0), (4, 5)]) == [(1, 1), (3, 5)]
