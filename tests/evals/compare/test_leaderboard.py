"""The leaderboard: which methods at which ratios, its table, and kvpress beside them."""

import dataclasses
import json

import pytest
from helpers import PLAIN
from helpers import model as tiny
from suites import Loaded, questions

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.asking.methods import parse_methods
from lowrank_kv_jax.evals.asking.suite import Suite
from lowrank_kv_jax.evals.compare import leaderboard
from lowrank_kv_jax.evals.compare.leaderboard import ASKED, leaderboard_table, method_specs, peer_specs, run_leaderboard
from lowrank_kv_jax.evals.peers import kvpress_run
from lowrank_kv_jax.evals.peers.kvpress_presses import PRESSES, parse_press, require_kvpress
from lowrank_kv_jax.evals.results.records import read_records
from lowrank_kv_jax.evals.ruler.generate import SEED
from lowrank_kv_jax.evals.ruler.tasks import RULER_6
from lowrank_kv_jax.methods import REGISTRY


def test_every_method_stands_at_the_ratios_it_reaches():
    specs = method_specs(PLAIN.attention)
    assert specs[0] == "full" and {spec.partition(":")[0] for spec in specs} == set(REGISTRY)
    assert len(parse_methods(specs)) == len(specs)
    assert {"snapkv:keep=0.5", "snapkv:keep=0.125", "static-pca:rank=0.25", "xkv:rank=0.25", "kivi:bits=4+kvzip:keep=0.125"} <= set(specs)
    assert len(peer_specs()) == 1 + 3 * len(PRESSES)


def test_it_goes_on_and_prints_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "ROWS", 1)
    path = tmp_path / "r.jsonl"
    one_layer = dataclasses.replace(PLAIN, context=2048, num_layers=1, windows=(None,))
    model = Loaded(one_layer, tiny(one_layer).params)
    methods = parse_methods(["full", "streamingllm:keep=0.5"])
    args = (path, ("niah_single_1",), (1024,), 1)
    run_leaderboard(model, "tiny", {"full": methods["full"]}, [], *args)
    assert len(read_records(path)) == 1
    run_leaderboard(model, "tiny", methods, [], *args)
    records = read_records(path)
    assert len(records) == 2
    peer = [dict(record, method="kvpress/snapkv:2x", nominal_smaller=2.0, score=100.0) for record in records[:1]]
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in peer))
    table = leaderboard_table(path, ("niah_single_1",))
    assert [row[0] for row in cells(table)] == ["`full`", "`streamingllm:keep=0.5`", "`kvpress/snapkv:2x`"]
    assert "| nominal | stored, 1024 | bases apart, 1024 | niah_single_1, 1024 |" in table and "1 at 1024 tokens" in table
    assert all(row[4] for row in cells(table)) and not any(row[4] for row in cells(leaderboard_table(path)))
    monkeypatch.setattr("lowrank_kv_jax.cli.options.load_from", lambda args: model)
    command = ["eval", "leaderboard", "--json", str(path), "--methods", *methods, "--tasks", "niah_single_1", "--lengths",
               "1024", "--samples", "1", "--markdown", str(tmp_path / "table.md")]
    assert main(command) == main(command) == 0  # its own table is replaced
    assert (tmp_path / "table.md").read_text().endswith(f"-->\n\n{table}")


def test_the_table_holds_this_run_only(tmp_path):
    """Records of other models, protocols, seeds and styles in the same file overwrite nothing; ruler-6 needs six tasks."""
    path, own = tmp_path / "r.jsonl", {"command": "eval ruler", "model": "m", "fingerprint": "a", "length": 1024,
                                       "cache_bytes": 10, "full_cache_bytes": 20, "nominal_smaller": 1.0, "seed": SEED, **ASKED}
    rows = [{**own, "method": method, "task": task, "index": i, "score": 100.0}
            for method, tasks in (("full", RULER_6), ("part", RULER_6[:5])) for task in tasks for i in range(2)]
    rows = [dict(row, shared_bytes=5) if row["method"] == "part" else row for row in rows]
    others = [dict(row, score=0.0, **other) for row in rows for other in (
        {"protocol": "query-aware"}, {"seed": 1}, {"style": "chat"}, {"fingerprint": "b"}, {"command": "eval needle"})]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + others))
    assert cells(leaderboard_table(path, fingerprint="a")) == [
        ["`full`", "1.0x", "2.00x", "2.00x", "100 [100, 100]"], ["`part`", "1.0x", "2.00x", "4.00x", ""]]
    assert leaderboard_table(path, fingerprint="a").endswith("12 at 1024 tokens (only 10 of `part`).\n")
    with pytest.raises(ValueError, match="several runs: .*fingerprint a; .*fingerprint b"):
        leaderboard_table(path)
    with pytest.raises(ValueError, match="no record.*fingerprint 'c'"):
        leaderboard_table(path, fingerprint="c")
    assert [row[-1] for row in cells(leaderboard_table(path, fingerprint="a", seed=1))] == ["0 [0, 0]", ""]


def cells(table):
    """The rows of a leaderboard's methods."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n") if line.startswith("| `")]


@pytest.mark.parametrize(("argv", "message"), [
    (["--samples", "0"], "--samples 0: must be at least 1"),
    (["--seed", "-1"], "seed"),
    (["--presses", "snapkv:2x"], "--peer kvpress"),
    (["--tasks", "niah_sngle_1"], "did you mean 'niah_single_1'?"),
    (["--peer", "kvpress", "--presses", "snap:2x"], "unknown kvpress method 'snap'"),
    (["--peer", "kvpress", "--presses", "snapkv:0.5x"], "the ratio must be spelled like 4x"),
])
def test_mistakes_are_told_in_one_line(capsys, tmp_path, argv, message):
    assert main(["eval", "leaderboard", "--json", str(tmp_path / "r.jsonl"), *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_without_kvpress_it_says_what_to_install(monkeypatch):
    assert parse_press("kvzip:2.5x") == ("kvzip", 2.5) and parse_press("full") == ("full", 1.0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs torch and kvpress.*pip install"):
        require_kvpress()


# ---- with kvpress ------------------------------------------------------------------------------------------


class Saved:
    """What the runner asks of a tokenizer, with nothing to save."""

    chat_template = None

    def __init__(self, letters):
        self._letters = letters

    def __getattr__(self, name):
        return getattr(self._letters, name)

    def __call__(self, *args, **kwargs):
        return self._letters(*args, **kwargs)

    def save_pretrained(self, folder):
        pass


@pytest.mark.filterwarnings("default")
def test_presses_answer_from_what_they_store(monkeypatch, tmp_path):
    """On a random Llama: the answers of the full cache are those of the model, and shrunken caches are smaller."""
    pytest.importorskip("kvpress")
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    spec = PLAIN.attention
    torch_model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=spec.num_layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, max_position_embeddings=512, initializer_range=0.3,
    )).eval()
    monkeypatch.setattr(kvpress_run, "load_torch_model", lambda source, dtype: torch_model)
    model, path = Loaded(tokenizer=Saved(Loaded().tokenizer)), tmp_path / "r.jsonl"
    # one token a question: kvpress masks by keys that repel all queries at once, which exist for few in 8 dimensions
    asked = tuple(dataclasses.replace(q, context=q.context * 3, question="?", answer_prefix="") for q in questions(2))
    suite = Suite("eval test", asked, rows=2)
    specs = ["full", "streamingllm:2x", "expected-attention:4x", "adakv:4x"]
    records = kvpress_run.evaluate_kvpress(model, "x", specs, suite, json=path)
    assert [r["method"] for r in records[:4]] == [f"kvpress/{spec}" for spec in specs]
    again = kvpress_run.evaluate_kvpress(model, "x", specs, suite, json=path)
    assert again == records and sorted(map(str, records)) == sorted(map(str, read_records(path)))
    smaller = {r["method"]: r["smaller"] for r in records}
    assert smaller["kvpress/full"] == smaller["kvpress/adakv:4x"] == 1  # masked, not stored in less
    assert 1 < smaller["kvpress/streamingllm:2x"] < 2 < smaller["kvpress/expected-attention:4x"] < 4
    ids = [ord(c) % 64 for c in asked[0].context + asked[0].question + asked[0].answer_prefix]
    for _ in range(4):
        with torch.inference_mode():
            ids.append(int(torch_model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert records[0]["prediction"] == "".join(chr(64 + i) for i in ids[-4:])
