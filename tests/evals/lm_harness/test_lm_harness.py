"""lm-eval on compressed caches: scores of continuations, and the adapter, its tasks and its records."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PLAIN
from helpers import model as tiny
from shared_data import shared
from suites import Letters, Loaded

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.lm_harness import run as lm_run
from lowrank_kv_jax.evals.lm_harness.scoring import make_pair, score_pairs
from lowrank_kv_jax.evals.lm_harness.tasks import TASKS, check_lines
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill, logits_of
from lowrank_kv_jax.methods.parse import parse_method

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
METHODS = parse_methods(["full", "streamingllm:budget=8,keep=none,sinks=2"])
TEXT = np.random.default_rng(3).integers(0, PLAIN.vocab_size, 300).tolist()


def exact(context, continuation):
    """Log-likelihood and greedy flag by exact attention, no cache involved."""
    ids = [*context, *continuation]
    logits = exact_logits(tuple(ids))[len(context) - 1 : len(ids) - 1]
    total = sum(float(row[token]) for row, token in zip(logits, continuation, strict=True))
    return total, [int(row.argmax()) for row in logits] == list(continuation)


@functools.cache
def exact_logits(ids):
    """Padded behind, where causal attention does not see it, so that all lengths share their programs."""
    params, tokens = tiny().params, jnp.asarray([[*ids, *[0] * (128 - len(ids))]])
    x = embed_tokens(PLAIN, params, tokens)
    for layer in params["layers"]:
        x, _ = layer_prefill(PLAIN, None, layer, x, jnp.arange(128)[None])
    return np.asarray(jax.nn.log_softmax(logits_of(PLAIN, params, x)))[0]


def test_the_full_cache_scores_like_the_model():
    """Contexts of several lengths and continuations, one of them longer than a block, in batches that do not fill up."""
    asked = [(TEXT[:40], TEXT[40:45]), (TEXT[:40], TEXT[50:88]), (TEXT[:1], TEXT[1:4]), (TEXT[7:9], TEXT[:1]),
             (TEXT[:33], TEXT[33:34])]
    likeliest = int(exact_logits(tuple(TEXT[:33]))[32].argmax())
    asked.append((TEXT[:33], [likeliest]))
    done = []
    scored = score_pairs(tiny(), METHODS["full"], [make_pair(*pair, 512) for pair in asked], rows=2, dtype="float32",
                         on_scored=done.append)
    for pair, one in zip(asked, scored, strict=True):
        total, best = exact(*pair)
        assert one.logprob == pytest.approx(total, abs=1e-4) and one.greedy == best
    assert scored[-1].greedy and not all(one.greedy for one in scored) and sum(done) == len(asked)


def test_every_token_is_scored_through_the_compressed_cache():
    """The first one too, although exact logits for it are there after the prefill."""
    context, continuation = TEXT[:60], TEXT[60:61]
    pair = make_pair(context, continuation, 512)
    assert len(pair.head) == 59 and pair.tail == (context[-1], *continuation)
    method, warm = METHODS["streamingllm:budget=8,keep=none,sinks=2"], set()
    (one,), (again,) = (score_pairs(tiny(), method, [pair], rows=1, dtype="float32", warm=warm) for _ in range(2))
    assert abs(one.logprob - exact(context, continuation)[0]) > 1e-3
    assert one.ttft_s is None and again.ttft_s > 0 and again.logprob == one.logprob  # a time without compilation


@pytest.mark.slow
def test_long_heads_and_long_tails_stand_apart():
    """Together they would not fit into the model's context, which a cache that holds what comes after exactly needs."""
    small = Loaded(dataclasses.replace(tiny().config, context=64), tiny().params)
    pairs = [make_pair(TEXT[:1], TEXT[1:60], 64), make_pair(TEXT[:55], TEXT[55:60], 64), make_pair(TEXT[:20], TEXT[20:30], 64)]
    method = parse_method("single-svd:rank=4,sinks=2,recent=4")
    together, alone = (
        [one.logprob for one in score_pairs(small, method, pairs, rows=rows, dtype="float32")] for rows in (3, 1))
    assert np.isfinite(together).all() and together == pytest.approx(alone, abs=1e-3)


def test_long_contexts_lose_their_beginning():
    pair = make_pair(range(100), range(5), 64)
    assert len(pair.head) + len(pair.tail) == 65 and pair.head[0] == 40 and pair.scored == 5
    assert make_pair([1], range(64), 64).head == (1,)
    for context, continuation, message in (([], [1], "at least one token"), ([1], [], "at least one token"),
                                           ([1], range(65), "65 tokens: the model's context is 64")):
        with pytest.raises(ValueError, match=message):
            make_pair(context, continuation, 64)


# ---- with lm-eval ------------------------------------------------------------------------------------------


def model():
    letters = Letters()
    letters.eos_token_id = 0
    return Loaded(tokenizer=letters)


@pytest.fixture
def files(tmp_path):
    """Two of the sets, three documents each."""
    piqa = [{"goal": f"How to {word}?", "sol1": "With a pan.", "sol2": f"With a {word}.", "label": i % 2}
            for i, word in enumerate(("cook", "dig", "paint"))]
    wino = [{"context_options": [f"Ann thanked {a}", f"Ann thanked {b}"], "continuation": "for the help.", "gold": 0}
            for a, b in (("Bob", "Eve"), ("Tim", "Joe"), ("Ida", "Kim"))]
    for name, rows in (("piqa", piqa), ("winogrande", wino)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_tasks_from_files_become_records_and_go_on(files, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(lm_run, "CHUNK", 2)
    path, tasks = tmp_path / "r.jsonl", ["piqa", "winogrande"]
    args = {"tasks": tasks, "data": files, "json": path, "rows": 2, "dtype": "float32"}
    with monkeypatch.context() as patch:
        left, append = [5], lm_run.append_record

        def killed(file, record):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            append(file, record)

        patch.setattr(lm_run, "append_record", killed)
        with pytest.raises(KeyboardInterrupt):
            lm_run.evaluate_lm_eval(model(), METHODS, **args)
    kept = read_records(path)
    assert len(kept) == 5
    records = lm_run.evaluate_lm_eval(model(), METHODS, **args)
    assert read_records(path)[:5] == kept and len(read_records(path)) == len(records) == 12
    assert [(r["task"], r["index"], r["method"]) for r in records] == [
        (task, i, spec) for task in tasks for i in range(3) for spec in METHODS]
    for record in records:
        assert record["cache_bytes"] == sum(record["bytes_by_kind"].values()) and record["score"] in (0, 100)
        assert len(record["logprobs"]) == 2 and 0 <= record["compressed_fraction"] <= 1
    full = records[0]
    assert full["logprobs"] == pytest.approx(
        [exact([ord(c) % 64 for c in "Question: How to cook?\nAnswer:"], [ord(c) % 64 for c in f" {text}"])[0]
         for text in ("With a pan.", "With a cook.")], abs=1e-3)
    assert full["score"] == 100 * full["metrics"]["acc_norm"]
    with pytest.raises(ValueError, match="another run .fewshot was None and is now 1"):
        lm_run.evaluate_lm_eval(model(), METHODS, fewshot=1, **args)


def test_likelihoods_that_are_no_numbers_are_told_and_null(files, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    broken = dataclasses.replace(model(), params=jax.tree.map(lambda x: x * np.nan, tiny().params))
    record, = lm_run.evaluate_lm_eval(broken, {"full": METHODS["full"]}, ["piqa"], 1, data=files, json=tmp_path / "r.jsonl")
    assert record["logprobs"] == [None, None] and read_records(tmp_path / "r.jsonl") == [record]
    assert "full: log-likelihoods are not finite" in capsys.readouterr().err


def test_rolling_and_generation():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from lowrank_kv_jax.evals.lm_harness.model import LowRankKV

    def instance(kind, *args):
        return Instance(kind, {}, args, 0)

    adapter = LowRankKV(model(), cache_dtype="float32", batch_size=2, max_length=48, progress=False)
    text = "some words that are longer than the window of forty-eight tokens, twice over in fact"
    ids = [ord(c) % 64 for c in text]
    rolled, = adapter.loglikelihood_rolling([instance("loglikelihood_rolling", text)])
    expected = exact([0], ids[:48])[0] + exact(ids[len(ids) - 49 : 48], ids[48:])[0]
    assert rolled == pytest.approx(expected, abs=1e-3)
    short, long, none = adapter.generate_until([
        instance("generate_until", "the question", {"until": [], "max_gen_toks": 3}),
        instance("generate_until", "another, longer question", {"until": [], "max_gen_toks": 12}),
        instance("generate_until", "", {"max_gen_toks": 2}),
    ])
    assert (len(short), len(long), len(none)) == (3, 12, 2)
    both = [instance("generate_until", text, {"max_gen_toks": 3}), instance("generate_until", "x", {"max_gen_toks": 30})]
    assert adapter.generate_until(both) == [adapter.generate_until([one])[0] for one in both]  # neither is cut for the other
    stop = long[4]
    stopped, = adapter.generate_until([
        instance("generate_until", "another, longer question", {"until": [stop], "max_gen_toks": 12})])
    assert stopped == long[: long.index(stop)]
    with pytest.raises(ValueError, match="greedy"):
        adapter.generate_until([instance("generate_until", "x", {"do_sample": True, "temperature": 1.0})])
    with pytest.raises(ValueError, match="no chat template"):
        adapter.apply_chat_template([{"role": "user", "content": "x"}])


def test_bad_files_and_arguments_are_named(files):
    pytest.importorskip("lm_eval")
    from lowrank_kv_jax.evals.lm_harness.model import LowRankKV
    from lowrank_kv_jax.evals.lm_harness.tasks import load_tasks

    with pytest.raises(FileNotFoundError, match="has no hellaswag.jsonl, but piqa, winogrande"):
        load_tasks(["hellaswag"], files, None, 0)
    with pytest.raises(FileNotFoundError, match="none: no such folder"):
        load_tasks(["piqa"], files / "none", None, 0)
    with pytest.raises(ValueError, match="unknown task 'copa': files are read for piqa"):
        load_tasks(["copa"], files, None, 0)
    (files / "piqa.jsonl").write_text('{"goal": "x", "sol1": "y"\n')
    with pytest.raises(ValueError, match="piqa.jsonl, line 1"):
        load_tasks(["piqa"], files, None, 0)
    (files / "piqa.jsonl").write_text('{"goal": "x", "sol1": "y", "sol2": "z", "label": 1}\n\n{"goal": "x"}\n')
    with pytest.raises(ValueError, match="piqa.jsonl, line 3: the field 'sol1' is missing"):
        load_tasks(["piqa"], files, None, 0)
    for arguments, message in (({"batch_size": "auto"}, "batch_size=auto"), ({"max_length": 9999}, "max_length=9999"),
                               ({"method": "ful"}, "did you mean 'full'")):
        with pytest.raises(ValueError, match=message):
            LowRankKV(model(), **arguments)
    with pytest.raises(ValueError, match="no tokenizer"):
        LowRankKV(dataclasses.replace(model(), tokenizer=None))


ARC = {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}


@pytest.mark.parametrize(("task", "row", "message"), [
    ("piqa", {"goal": "x", "sol1": "y", "sol2": "z", "label": 7}, "line 2: label=7: expected a number in 0..1"),
    ("piqa", {"goal": "x", "sol1": "y", "sol2": "z", "label": "1"}, "line 2: label='1': expected a number in 0..1"),
    ("piqa", {"goal": "x", "sol1": "", "sol2": "z", "label": 1}, "line 2: sol1='': expected a string"),
    ("arc_easy", ARC | {"answerKey": "C"}, "line 2: answerKey='C': expected one of A, B"),
    ("arc_challenge", ARC | {"choices": ["x", "y"]}, "line 2: choices=.*text and label"),
    ("arc_easy", ARC | {"choices": {"text": ["x"], "label": ["A", "B"]}}, "line 2: choices.label=.*each of the 1 texts"),
    ("winogrande", {"context_options": ["a", "b"], "continuation": "c", "gold": 2}, "line 2: gold=2: .*0..1"),
    ("hellaswag", {"query": "q", "choices": ["a", "b", "c"], "gold": -1}, "line 2: gold=-1: .*0..2"),
    ("hellaswag", {"query": "q", "choices": [], "gold": 0}, r"line 2: choices=\[\]: expected a list"),
    ("hellaswag", [], "line 2: expected an object with the fields query, choices, gold, got list"),
])
def test_malformed_documents_are_named(tmp_path, task, row, message):
    path = tmp_path / f"{task}.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"{path.name}, {message}"):
        check_lines(path, task)


def test_files_without_documents_and_other_bytes_are_named(tmp_path):
    path = tmp_path / "arc_easy.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="arc_easy.jsonl: holds no document"):
        check_lines(path, "arc_easy")
    path.write_bytes(json.dumps(ARC).encode() + b"\n" + json.dumps(ARC).encode().replace(b'"q"', b'"\xff"'))
    with pytest.raises(ValueError, match="arc_easy.jsonl, line 2: .*can't decode byte 0xff"):
        check_lines(path, "arc_easy")


@pytest.mark.parametrize("task", TASKS)
def test_published_documents_are_taken(task):
    check_lines(shared("lm_eval", f"{task}.jsonl"), task)


@pytest.mark.parametrize("options, message", [
    ("--tasks nothing --data {}", "unknown task 'nothing': files are read for piqa"),
    ("--tasks hellaswag --data {}", "has no hellaswag.jsonl, but piqa, winogrande"),
    ("--tasks piqa --data {} --calibrate {}/none.txt", "none.txt': no such file"),
])
def test_mistakes_are_told_before_a_model_is_loaded(files, options, message, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    assert main(["eval", "lm-eval", *options.replace("{}", str(files)).split()]) == 2
    assert message in capsys.readouterr().err


def test_without_lm_eval_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", "lm-eval"]) == 2
    assert "pip install" in capsys.readouterr().err


def test_lm_eval_knows_the_model():
    """With the plugin's folder on the path its .pth line is what Python runs when the package is installed."""
    pytest.importorskip("lm_eval")
    folder = Path(lm_run.__file__).parent / "plugin"
    line = (folder / "lowrank_kv_lm_eval.pth").read_text()
    code = (f"{line}\nimport sys\nassert 'lm_eval' not in sys.modules and 'jax' not in sys.modules\n"
            "import lm_eval.models\nfrom lm_eval.api.registry import get_model\nprint(get_model('lowrank-kv').__name__)")
    root = str(Path(__file__).parents[3])
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), root)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "LowRankKV", done.stderr[-2000:]
