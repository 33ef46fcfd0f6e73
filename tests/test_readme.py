"""The Python of the README and of the docs runs as it stands, from top to bottom of a page."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from documented import OF_SPECS, PAGES, ROOT, code_of, specs_of
from written_model import write_model

import lowrank_kv_jax as lkv
import lowrank_kv_jax.testing
from lowrank_kv_jax.estimators.estimator import ESTIMATORS
from lowrank_kv_jax.method import REGISTRY
from lowrank_kv_jax.models import load_model

FEWER_WINDOWS = """
import functools, lowrank_kv_jax as lkv
lkv.calibrate = functools.partial(lkv.calibrate, length=512, windows=1)  # the blocks leave both at their defaults
"""
OUTCOME = """
assert out.tokens[0] and more.tokens[0] and used.total > 0
assert int(more.cache.length[0]) > int(out.cache.length[0])
assert lkv.load_cache("talk", method, model, bases=bases).length == out.cache.length
print(out.texts[0] + more.texts[0])
"""


def python_of(page: str) -> list[str]:
    """The blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.slow  # quick-start holds the same block, and runs below
def test_the_readme_runs_on_the_real_model(tmp_path):
    (block,) = python_of("README.md")
    code = "\n".join([FEWER_WINDOWS, block, OUTCOME])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


# ---- the docs, on a model of one layer in the place of the real one ----------------------------------------------

@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder with `my-llama`, which also stands for the model that comes along; what a page registers goes again."""
    write_model(tmp_path / "my-llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lkv, "load_model", lambda source, **given: load_model("my-llama", **given))
    monkeypatch.setattr(lkv, "calibrate", functools.partial(lkv.calibrate, length=512, windows=1))
    known = [(table, dict(table)) for table in (REGISTRY, ESTIMATORS)]
    yield
    for table, before in known:
        table.clear()
        table.update(before)


def run_page(page: str, apart: str = "\0") -> dict:
    """Run its blocks, but those that hold the word `apart`."""
    names: dict = {"__name__": "page"}
    for i, block in enumerate(block for block in python_of(page) if apart not in block):
        exec(compile(block, f"{page}, block {i + 1}", "exec"), names)
    return names


def test_quick_start(shelf):
    assert set(python_of("README.md")) <= set(python_of("docs/quick-start.md"))
    names = run_page("docs/quick-start.md")
    assert int(names["same"].length[0]) == int(names["out"].cache.length[0])
    assert names["one"].layout.batch == 1 and names["logits"].shape == (2, 256)
    assert lkv.spell_method(names["smaller"]) == "kivi:bits=4+kvzip:keep=0.25"


@pytest.mark.parametrize("promises", ["named", pytest.param("kept", marks=pytest.mark.slow)])
def test_extending(shelf, capsys, monkeypatch, promises):
    checked = []
    if promises == "named":  # that parts of one's own are checked: tests/testing/test_contract_of_ones_own.py
        monkeypatch.setattr(lowrank_kv_jax.testing, "check_part", checked.append)
    names = run_page("docs/extending.md")
    assert checked in ([], [names["LongKeys"], names["Float8"]])
    assert REGISTRY["long-keys"] is names["LongKeys"] and REGISTRY["float8"] is names["Float8"]
    assert ESTIMATORS["power"] is names["PowerIteration"]
    said = capsys.readouterr().out
    assert all(spec in said for spec in ("kivi:bits=8+long-keys:keep=0.5+moments", "float8+snapkv:keep=0.5"))


def test_parts_of_ones_own_are_files_too():
    """What the page runs, with the imports that a file needs (ruff knows what is missing)."""
    blocks = python_of("docs/extending.md")
    for name, block in zip(("long_keys", "float8_codec", "power_estimator"), blocks[:6:2], strict=True):
        code = re.sub(r"^(import|from) .*\n", "", block, flags=re.MULTILINE).strip()
        assert code in (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


def test_own_model(shelf):
    names = run_page("docs/own-model.md")
    assert names["out"].tokens[0] and names["votes"].shape == (1, 2, 128)
    assert np.isfinite(np.asarray(names["attended"])).all() and names["cache"].length.tolist() == [128]
    with pytest.raises(ValueError, match=r"0\.[3-9]\d* of its norm|1\.\d+ of its norm"):
        lkv.check_rotation(names["spec"], names["own"], names["at"])


@pytest.mark.slow
def test_serving(shelf, capsys):
    names = run_page("docs/serving.md", apart="openai")  # tests/serving/http/test_server.py has a server for it
    assert all(names[name].done for name in ("first", "second", "third"))
    assert names["engine"].bytes <= names["engine"].memory and names["first"].text in capsys.readouterr().out


# ---- what pages name ------------------------------------------------------------------------------------------------

ROOT_FOLDERS = "tests|docs|examples|evals|models|pallas_kernels|lowrank_kv_jax"
PATH = re.compile(rf"(?<![\w./-])((?:\.ci|{ROOT_FOLDERS}|codecs|selections|estimators)/[\w./-]*\w)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {path for piece in code_of(text) for path in PATH.findall(piece)}
    missing = {path for path in named if not ((ROOT / path).exists() or (ROOT / "lowrank_kv_jax" / path).exists())}
    assert not missing
    for target, anchor in LINK.findall(text):
        there = (ROOT / page).parent / target
        assert there.is_file(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", OF_SPECS)
def test_specs_are_spelled_as_they_are_read(page):
    for spec in specs_of(page):
        lkv.parse_method(spec)
