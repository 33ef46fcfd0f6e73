"""Methods of other packages and of notebooks: found by entry points, by `--import`, and defined anew."""

import os
import subprocess
import sys

import pytest

import lowrank_kv_jax as lkv
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.cli.imports import take_imports
from lowrank_kv_jax.estimators.estimator import ESTIMATORS
from lowrank_kv_jax.methods import REGISTRY

OWN = '''
import dataclasses
from lowrank_kv_jax.method import register
from lowrank_kv_jax.selections.budgeted import Budgeted

@register("{name}")
@dataclasses.dataclass(frozen=True)
class {title}(Budgeted):
    """{says}"""

    decoding: str = "keep"

    def prompt_scores(self, layout, tap, lengths):
        return tap.v.sum(-1).swapaxes(1, 2)
'''


@pytest.fixture
def registry():
    """What a test registers goes again."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_cell_that_runs_again_defines_its_method_anew(registry):
    cell = {"__name__": "__main__"}
    exec(OWN.format(name="long-values", title="LongValues", says="First."), cell)
    old = cell["LongValues"]
    exec(OWN.format(name="long-values", title="LongValues", says="Second."), cell)
    assert REGISTRY["long-values"] is cell["LongValues"] is not old
    assert isinstance(lkv.parse_method("long-values:keep=0.5"), cell["LongValues"])
    assert old(keep=0.5) != lkv.parse_method("long-values:keep=0.5")  # a cache of the old one is not read by the new one
    with pytest.raises(ValueError, match="method name 'long-values' is taken by __main__.LongValues"):
        exec(OWN.format(name="long-values", title="Other", says="Third."), cell)
    with pytest.raises(ValueError, match="method name 'full' is taken by lowrank_kv_jax.codecs.verbatim.Full"):
        exec(OWN.format(name="full", title="Full", says="Mine."), cell)


def test_an_estimators_name_stays_its_own():
    from lowrank_kv_jax.estimators.estimator import Estimator, register_estimator

    name = sorted(ESTIMATORS)[0]
    assert register_estimator(name)(ESTIMATORS[name]) is ESTIMATORS[name]
    with pytest.raises(ValueError, match=f"estimator name '{name}' is taken by lowrank_kv_jax.estimators"):
        register_estimator(name)(type("Mine", (Estimator,), {}))


def test_installed_packages_and_modules_of_the_working_directory(tmp_path):
    installed, here = tmp_path / "site", tmp_path / "here"
    for name in ("installed", "broken"):
        about = installed / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[lowrank_kv_jax.methods]\n{name} = {name}_methods\n")
    (installed / "installed_methods.py").write_text(OWN.format(name="installed", title="Installed", says="Of a package."))
    (installed / "broken_methods.py").write_text("import what_is_not_there\n")
    here.mkdir()
    (here / "mine.py").write_text(OWN.format(name="mine", title="Mine", says="Of a file."))
    done = subprocess.run(
        [sys.executable, "-m", "lowrank_kv_jax.cli", "methods", "installed", "mine", "--import", "mine"], cwd=here,
        env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Of a package." in done.stdout and "Of a file." in done.stdout
    assert "broken = broken_methods cannot be imported (ModuleNotFoundError: No module named 'what_is_not_there')" in done.stderr


@pytest.mark.parametrize("argv, message", [
    (["methods", "--import"], "--import '': expected the name of a module"),
    (["--import=", "methods"], "--import '': expected the name of a module"),
    (["--import", "--model", "methods"], "--import '--model': expected the name of a module"),
    (["--import", "not_there", "methods"], "--import not_there: ModuleNotFoundError: No module named 'not_there'"),
])
def test_modules_that_are_not_there_are_told_in_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(argv) == 2
    assert capsys.readouterr().err == f"lowrank-kv: error: {message}\n"


def test_what_comes_after_two_dashes_is_nobodys_option():
    assert take_imports(["a", "--import=b", "--", "--import", "c"]) == (["a", "--", "--import", "c"], ["b"])
