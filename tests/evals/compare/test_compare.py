"""Needle samples, perplexity through a cache, records, and `compare` on a tiny random model."""

import dataclasses
import json
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_data import FOLDER

from lowrank_kv_jax.attention.rope import RopeSpec
from lowrank_kv_jax.evals.asking.answer import answer
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.prefill_many import pad_rows, prefill_many
from lowrank_kv_jax.evals.compare.plot import plot_results
from lowrank_kv_jax.evals.compare.run import Settings, compare, work
from lowrank_kv_jax.evals.compare.run import records as compare_records
from lowrank_kv_jax.evals.needle.samples import make_needle, substring_score
from lowrank_kv_jax.evals.perplexity.score import perplexity
from lowrank_kv_jax.evals.report.sections import read_report
from lowrank_kv_jax.evals.results import records
from lowrank_kv_jax.evals.results.sizes import nominal_smaller, size_of
from lowrank_kv_jax.evals.speed.timing import alternate
from lowrank_kv_jax.generation.forward import embed_tokens, layer_prefill, logits_of, prefill
from lowrank_kv_jax.generation.generate import generate
from lowrank_kv_jax.method.cache import Cache
from lowrank_kv_jax.methods import Full, SingleSVD
from lowrank_kv_jax.models.config import ModelConfig
from lowrank_kv_jax.models.decoder import init_params

OFFICIAL = FOLDER / "ruler"


class Characters:
    """A tokenizer of printable ASCII, one token a character."""

    bos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [10 if c == "\n" else max(11, min(ord(c), 126)) for c in text]

    def decode(self, ids, skip_special_tokens=False) -> str:
        return "".join(chr(i) if i > 31 else "\n" for i in ids)

    def __call__(self, text: str, **options) -> Any:
        del options

        class Encoded(NamedTuple):
            input_ids: list[int]

        return Encoded(self.encode(text))


class Model(NamedTuple):
    name: str
    config: ModelConfig
    params: Any
    tokenizer: Any
    fingerprint: str = "tiny"


@pytest.fixture(scope="module")
def model() -> Model:
    config = ModelConfig(
        family="llama", vocab_size=128, hidden_size=16, intermediate_size=24, num_layers=2, q_heads=4,
        kv_heads=2, head_dim=8, norm_eps=1e-5, rope=RopeSpec(10000.0, 8), context=2048, windows=(None, None),
    )
    return Model("tiny", config, init_params(config, jax.random.key(0)), Characters())


# ---- needles -------------------------------------------------------------------------------------


def masked(text: str) -> list[str]:
    """Distinct lines in order, keys and numbers replaced."""
    text = re.sub(r"\d{7}", "NUMBER", re.sub(r"\b[a-z]+-[a-z]+\b", "KEY", text))
    lines = text.split("\n")
    return [line for i, line in enumerate(lines) if i == 0 or line != lines[i - 1]]


def test_needles_have_the_form_of_the_official_generator():
    file = OFFICIAL / "1024" / "niah_single_1.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    official = json.loads(file.read_text().splitlines()[0])
    ours = make_needle(Characters(), 4096, depth=0.5)
    assert masked(ours.context + ours.question) == masked(official["input"] + official["answer_prefix"])


@pytest.mark.parametrize("length", [900, 1500, 4096])
def test_needles_are_as_long_as_fits(length):
    tokenizer, sentence = Characters(), 91
    for index in range(4):
        sample = make_needle(tokenizer, length, index=index)
        assert sample.length == len(tokenizer.encode(sample.context + sample.question)) + 128
        assert length - sentence < sample.length <= length
        assert sample.context.endswith("\n") and sample.question.startswith("What is the special magic")
        assert sample.context.count(sample.outputs[0]) == 1 and len(sample.outputs[0]) == 7


def test_needles_follow_from_seed_length_and_index_alone():
    tokenizer = Characters()
    samples, again, others = ([make_needle(tokenizer, 2000, seed, index) for index in range(5)] for seed in (3, 3, 4))
    assert samples == again != others
    assert len({s.outputs for s in samples}) == 5 and len({s.depth for s in samples}) > 1


@pytest.mark.parametrize("depth, line", [(0.0, 1), (1.0, -2)])
def test_needle_at_a_depth(depth, line):
    sample = make_needle(Characters(), 2000, depth=depth)
    lines = sample.context.split("\n")
    assert sample.depth == depth and sample.outputs[0] in lines[line]


def test_needles_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="length=300: the shortest niah_single_1 sample takes"):
        make_needle(Characters(), 300)
    with pytest.raises(ValueError, match="depth=1.5"):
        make_needle(Characters(), 2000, depth=1.5)


def test_substring_score():
    assert substring_score("It is 1234567.", ("1234567",)) == 1
    assert substring_score("ABC def", ("abc", "DEF", "ghi", "x")) == 0.5


# ---- prefill for several methods, answers --------------------------------------------------------


def leaves(cache: Cache) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(cache)]


def test_one_prefill_for_many_methods_is_each_methods_own(model):
    rows = [list(range(30, 30 + n)) for n in (90, 61)]
    tokens, lengths = pad_rows(rows, 96)
    methods = parse_methods(["full", "streamingllm:keep=0.25", "single-svd:rank=0.5,recent=8"])
    caches, shared = prefill_many(
        methods, model.config, model.params, tokens, lengths, bases={}, capacity=128, block=16
    )
    assert list(caches) == list(methods)
    for spec, method in methods.items():
        own, logits = prefill(method, model.config, model.params, tokens, lengths, capacity=128, block=16)
        np.testing.assert_array_equal(logits, shared[spec])
        chex.assert_trees_all_equal_structs(own, caches[spec])
        for mine, theirs in zip(leaves(caches[spec]), leaves(own), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_answers_are_what_generate_says(model):
    rng = np.random.default_rng(0)
    contexts, questions = ([list(rng.integers(32, 127, n)) for n in sizes] for sizes in ((70, 64), (5, 37)))
    tokens, lengths = pad_rows(contexts, 80)
    cache, _ = prefill(
        Full(), model.config, model.params, tokens, lengths, capacity=160, block=16, dtype=jnp.float32
    )
    got = answer(Full(), model, cache, questions, 24)
    prompts = [c + q for c, q in zip(contexts, questions, strict=True)]
    assert texts(model, got) == generate(model, Full(), prompts, max_new_tokens=24, dtype=jnp.float32).texts


def texts(model, answers):
    return [model.tokenizer.decode(ids) for ids in answers]


@pytest.mark.parametrize("spec", [
    "single-svd:rank=8", *(pytest.param(spec, marks=pytest.mark.slow) for spec in ("full", "h2o:budget=32,recent=8"))])
def test_drafts_change_no_answer(model, spec):
    """Right to the end, left at once, in the first block or behind it, too short, too long, or none."""
    method, rng = parse_methods([spec])[spec], np.random.default_rng(0)
    context, question = (list(rng.integers(32, 127, n)) for n in (70, 5))

    def ask(rows, drafts, most=40, enough=None):
        tokens, lengths = pad_rows([context] * rows, 80)
        cache, _ = prefill(method, model.config, model.params, tokens, lengths, capacity=160, block=16, dtype=jnp.float32)
        return answer(method, model, cache, [question] * rows, most, drafts=drafts, enough=enough)

    whole, _ = ask(2, None)
    wrong = [(token + 1) % 127 for token in whole]
    drafts = [whole, wrong, whole[:3] + wrong[3:], whole[:20] + wrong[20:], whole[:10], whole[:16], whole * 2, []]
    for i in range(0, len(drafts), 2):  # no more rows than below: their programs are the same
        assert ask(2, drafts[i : i + 2]) == [whole] * 2
    assert ask(2, [whole, wrong], most=16) == [whole[:16]] * 2
    seen = []
    assert ask(2, [whole, whole[:18] + wrong], enough=lambda row, text: seen.append(row) or len(text) >= 20) == [whole[:20]] * 2
    assert seen == [0] * 20 + [1] * 20  # once for each token


def test_pages_are_not_chosen_by_a_draft(model):
    """Tokens that are read together share their pages: such a method answers step by step."""
    method, rng = parse_methods(["quest:budget=8,keep=none,page=4,sinks=2,recent=4,dense_layers=0"]), np.random.default_rng(0)
    (method,), context, question = method.values(), list(rng.integers(32, 127, 70)), list(rng.integers(32, 127, 5))

    def ask(drafts):
        tokens, lengths = pad_rows([context], 80)
        cache, _ = prefill(method, model.config, model.params, tokens, lengths, capacity=160, block=16, dtype=jnp.float32)
        return answer(method, model, cache, [question], 20, drafts=drafts)

    whole = ask(None)
    assert ask(whole) == whole


def test_an_answer_ends_when_it_is_enough(model):
    tokens, lengths = pad_rows([list(range(40, 90))], 64)
    cache, _ = prefill(Full(), model.config, model.params, tokens, lengths, capacity=128)
    (ids,) = answer(Full(), model, cache, [[50, 51]], 30, enough=lambda row, text: len(text) >= 3)
    assert len(ids) == 3


@pytest.mark.parametrize("method", [pytest.param(Full(), marks=pytest.mark.slow), SingleSVD(rank=8)])
def test_rows_that_are_done_leave_the_batch(model, method):
    """The others answer as if alone; the batch is halved as often as they fit."""
    rng = np.random.default_rng(0)
    contexts, questions = ([list(rng.integers(32, 127, n)) for n in sizes] for sizes in ((70, 64, 50, 66), (5, 9, 3, 7)))
    most, sizes = [20, 1, 3, 12], []

    def ask(batch, seen):
        tokens, lengths = pad_rows([contexts[row] for row in batch], 80)
        cache, _ = prefill(
            method, model.config, model.params, tokens, lengths, capacity=160, block=16, dtype=jnp.float32
        )
        return answer(method, model, cache, [questions[row] for row in batch], 24,
                      enough=lambda row, text: len(text) >= most[batch[row]], on_fewer_rows=lambda: seen.append(1))

    together = ask([0, 1, 2, 3], sizes)
    assert len(sizes) == 2  # 4 -> 2 -> 1
    assert together == [ids for row in range(4) for ids in ask([row], [])]


# ---- perplexity ----------------------------------------------------------------------------------


def model_logits(model: Model, tokens: np.ndarray) -> jax.Array:
    """Logits of every token by exact attention, no cache involved."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = embed_tokens(model.config, model.params, jnp.asarray(tokens))
    for layer in model.params["layers"]:
        x, _ = layer_prefill(model.config, None, layer, x, positions)
    return logits_of(model.config, model.params, x)


@pytest.mark.parametrize("scored", [1, 16, 41])
def test_perplexity_through_a_full_cache_is_that_of_the_model(model, scored):
    tokens = np.random.default_rng(1).integers(0, 128, (2, 50 + scored))
    got = perplexity(model, Full(), tokens, 50, block=16, dtype=jnp.float32)
    logp = np.asarray(jax.nn.log_softmax(model_logits(model, tokens)))[:, 49:-1]
    expected = -np.take_along_axis(logp, tokens[:, 50:, None], axis=2)[..., 0]
    np.testing.assert_allclose(got.nll, expected, atol=2e-5)
    assert got.ppl == pytest.approx(np.exp(got.nll.mean()))


def test_perplexity_needs_something_to_score(model):
    with pytest.raises(ValueError, match="prefix=9: must lie in 1..8"):
        perplexity(model, Full(), np.zeros((1, 9), np.int32), 9)


# ---- sizes ---------------------------------------------------------------------------------------


def test_sizes_of_one_row_and_on_paper(model):
    tokens = jnp.ones((3, 64), jnp.int32)
    cache, _ = prefill(Full(), model.config, model.params, tokens, capacity=96)
    size = size_of(cache)
    assert size.full == 96 * 2 * 2 * 2 * 2 * 8 and size.nominal_smaller == pytest.approx(1.0, abs=0.01)
    assert size.total == sum(size.by_kind.values()) >= size.full and size.compressed == 0
    spec = model.config.attention
    paper = {
        spec_text: nominal_smaller(method, spec)
        for spec_text, method in parse_methods(
            ["streamingllm:keep=0.25", "streamingllm:budget=64,keep=none", "single-svd:rank=0.25"]
        ).items()
    }
    assert paper["streamingllm:keep=0.25"] == pytest.approx(4, abs=0.05)
    assert paper["streamingllm:budget=64,keep=none"] is None
    assert paper["single-svd:rank=0.25"] == pytest.approx(4, abs=0.05)


# ---- records -------------------------------------------------------------------------------------


def test_records_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "results.jsonl"
    first = records.make_record("compare", method="full", score=100.0, extra=[1, 2])
    records.append_record(path, first)
    records.append_record(path, records.make_record("compare", method="ojakv"))
    assert set(records.FIELDS) <= set(first) and first["peak_bytes"] > 2**20
    assert records.read_records(path)[0] == first and len(path.read_text().splitlines()) == 2


def test_a_killed_run_loses_its_last_line_only(tmp_path):
    path = tmp_path / "results.jsonl"
    records.append_record(path, {"score": 1})
    with open(path, "a") as file:
        file.write('{"score": 2, "meth')
    records.append_record(path, {"score": 3})
    assert [r["score"] for r in records.read_records(path)] == [1, 3]


def test_records_hold_no_nan(tmp_path):
    with pytest.raises(ValueError):
        records.append_record(tmp_path / "results.jsonl", {"score": float("nan")})


# ---- timing --------------------------------------------------------------------------------------


def test_contenders_alternate_and_the_warm_up_does_not_count():
    turns = []

    @dataclasses.dataclass
    class Fake:
        name: str

        def round(self):
            turns.append(self.name)
            return float(len(turns)), 2.0

    timings = alternate({"a": Fake("a"), "b": Fake("b")}, steps=10, rounds=3)
    assert turns == ["a", "b"] * 4
    assert timings["a"].first == (3, 5, 7) and timings["a"].ttft_s == 5
    assert timings["b"].decode_tokens_per_s == 5


# ---- compare -------------------------------------------------------------------------------------


def test_compare_on_a_tiny_model(model, tmp_path):
    config = dataclasses.replace(model.config, num_layers=1, windows=(None,))
    model = model._replace(config=config, params=model.params | {"layers": model.params["layers"][:1]})
    methods = parse_methods(["full", "static-pca:rank=0.5"])
    settings = Settings(
        lengths=(700,), samples=3, rows=2, calibration_windows=1, windows=2, scored=40, new_tokens=4,
        rounds=1, steps=4,
    )
    done = []
    results = compare(model, methods, settings, lambda name, share: done.append(share))
    assert sum(done) == pytest.approx(work(methods, settings))
    assert [r.spec for r in results] == list(methods)
    full, coded = results
    assert coded.size[700].total < 0.8 * full.size[700].total
    assert full.perplexity.nll.shape == (2, 40) and np.isfinite(coded.perplexity.nll).all()
    rows = compare_records(model, results, settings)
    assert len(rows) == 2 * (3 + 2) and {row["task"] for row in rows} == {"niah_single_1", "perplexity-stream"}
    fitted_to = [row["calibration"] for row in rows if row["method"] != "full"]
    assert all(own["corpus"] == "pydoc:first" and (own["windows"], own["length"]) == (1, 700) for own in fitted_to)
    for row in rows:
        assert (row["calibration"] is None) == (row["method"] == "full")
        assert set(records.FIELDS) <= set(row) and row["protocol"] == "query-agnostic" and row["ttft_s"] > 0
        records.append_record(tmp_path / "out.jsonl", row)
    needles, text = read_report([tmp_path / "out.jsonl"])
    assert [entry.samples for entry in needles.entries] == [3, 3]
    for result, entry in zip(results, text.entries, strict=True):
        assert entry.perplexity.mean == pytest.approx(result.perplexity.ppl, rel=1e-6)
    plot_results(results, tmp_path / "figure.png", "tiny")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_in_chunks_measures_caches_that_were_read_so(model):
    """A selection that forgets between chunks says other things than one that sees the whole."""
    methods = parse_methods(["full", "snapkv:keep=0.1,sinks=4,recent=8"])
    base = Settings(lengths=(1000,), samples=1, new_tokens=2, windows=1, scored=16, rounds=1, steps=4, dtype="float32")
    whole, chunked = (compare(model, methods, dataclasses.replace(base, prefill_chunk=chunk)) for chunk in (None, 128))
    full, snapkv = zip(whole, chunked, strict=True)
    np.testing.assert_allclose(full[0].perplexity.nll, full[1].perplexity.nll, atol=1e-3)
    assert np.abs(snapkv[0].perplexity.nll - snapkv[1].perplexity.nll).max() > 1e-3
    rows = compare_records(model, chunked, dataclasses.replace(base, prefill_chunk=128))
    assert {row["prefill_chunk"] for row in rows} == {128}


def test_a_text_is_scored_within_the_context():
    assert Settings(lengths=(1024, 8192), scored=512).prefix(8192) == 1024
    assert Settings(lengths=(8192,), scored=512).prefix(8192) == 7680
    assert Settings(lengths=(2048,), scored=4096).prefix(2048) == 1024


def test_compare_refuses_what_cannot_be(model):
    with pytest.raises(ValueError, match="prefill_chunk=0: must be at least 1"):
        Settings(prefill_chunk=0)
    with pytest.raises(ValueError, match="each may be given once"):
        parse_methods(["full", "full"])
    with pytest.raises(ValueError, match="^methods 'kivi:bits=4' and 'kivi:bits=4,': are one method, give it once"):
        parse_methods(["kivi:bits=4", "full", "kivi:bits=4,"])
    for lengths, named in (({"lengths": (1000, 4096)}, "lengths=4096"),
                           ({"lengths": (1000,), "timed_length": 4096}, "timed_length=4096")):
        with pytest.raises(ValueError, match=f"^{named}: is more than the model's context of 2048 tokens"):
            compare(model, parse_methods(["full"]), Settings(**lengths))
    with pytest.raises(ValueError, match="single-svd:rank=999: rank=999"):
        compare(model, parse_methods(["single-svd:rank=999"]), Settings(lengths=(1000,)))
    with pytest.raises(ValueError, match="samples=0"):
        Settings(samples=0)


@pytest.mark.parametrize("settings, message", [
    ({"text": "none.txt"}, "corpus 'none.txt': no such file"),
    ({"lengths": (1000, 300)}, "length=300: the shortest niah_single_1 sample takes"),
])
def test_compare_refuses_before_it_measures(model, settings, message):
    def measured(name: str, done: float) -> None:
        raise AssertionError(name)

    with pytest.raises((ValueError, OSError), match=message):
        compare(model, parse_methods(["full"]), Settings(**{"lengths": (1000,), "samples": 1, **settings}), measured)


def test_compare_names_a_text_that_is_too_short(model, tmp_path):
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="short': has 5 tokens, must have at least 1256"):
        compare(model, parse_methods(["full"]), Settings(lengths=(1000,), samples=1, text=str(tmp_path / "short")))


def test_all_methods_have_defaults_to_compare():
    methods = parse_methods(["all"])
    assert list(methods)[0] == "full" and len(methods) > 5
