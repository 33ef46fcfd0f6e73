"""Without the packages of an extra: one line that names the extra and how to get it."""

import sys

import pytest
from commands import refused_command
from refusing import refused

from lowrank_kv_jax.calibration.corpus import load_corpus
from lowrank_kv_jax.evals.longbench.metrics import rouge_l
from lowrank_kv_jax.evals.longbench.samples import _dataset_rows
from lowrank_kv_jax.evals.results.figure_file import new_figure, pyplot
from lowrank_kv_jax.evals.ruler import qa, words


@pytest.fixture(autouse=True)
def core_alone(monkeypatch):
    """What extras bring cannot be imported."""
    for name in ("datasets", "lm_eval", "matplotlib", "rouge", "starlette", "uvicorn", "wonderwords"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("call, extra", (
    (lambda: load_corpus("organisation/name"), "datasets"), (lambda: _dataset_rows("organisation/name", "task"), "datasets"),
    (lambda: qa._from_hub("squad"), "datasets"), (lambda: words.word_list.__wrapped__("noun"), "evals"),
    (lambda: rouge_l("a b", "a b"), "evals"), (pyplot, "plot"), (new_figure, "plot"),
), ids=("corpus", "longbench", "ruler", "words", "rouge", "pyplot", "figure"))
def test_a_function_says_what_to_install(call, extra):
    refused(call, f"pip install 'lowrank-kv-jax[{extra}]'")


def test_a_folder_of_data_files_is_a_dataset(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    refused(lambda: load_corpus(tmp_path), "a folder of data files: needs the package datasets")


@pytest.mark.parametrize("line, extra", (
    ("compare --plot {d}/p.png", "plot"), ("inspect --prompt x --out {d}/p.png", "plot"), ("eval needle --plot {d}/p.png", "plot"),
    ("report {d}/score.jsonl --out {d}/report", "plot"), ("eval lm-eval", "lm-eval"), ("eval perplexity --text a/b", "datasets"),
    ("serve --port 0", "serve"),
))
def test_a_command_says_what_to_install(line, extra, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    (tmp_path / "score.jsonl").write_text('{"command": "c", "model": "m", "method": "full", "task": "t", "score": 1}\n')
    refused_command(capsys, line.format(d=tmp_path).split(), f"pip install 'lowrank-kv-jax[{extra}]'")
    assert [path.name for path in tmp_path.iterdir()] == ["score.jsonl"]
