"""Command lines by the table: what is given, and words of the one line that refuses it. No model is loaded."""

import os
import subprocess
import sys

import pytest
from commands import refused_command

from lowrank_kv_jax.serving.http.server import bind

TABLE = (  # arguments, where {d} is a directory with the files of `place`, and words
    ("", "required: COMMAND"),
    ("--nothing", "unrecognized arguments: --nothing"),
    ("nothing", "invalid choice: 'nothing'"),
    ("--import", "--import '': expected the name of a module"),
    ("--import no_such_module methods", "--import no_such_module: ModuleNotFoundError"),
    ("eval", "required: BENCHMARK"),
    ("inspect --prompt a b", "unrecognized arguments: b; see `lowrank-kv inspect --help`"),
    ("eval needle --nothing 1", "unrecognized arguments: --nothing 1; see `lowrank-kv eval needle --help`"),
    ("eval nothing", "invalid choice: 'nothing'"),
    ("bench", "required: KIND"),
    ("methods nothing", "unknown method 'nothing'"),
    ("methods OjaKV", "unknown method 'OjaKV', did you mean 'ojakv'?"),
    ("compare --nothing", "unrecognized arguments: --nothing"),
    ("compare --samples x", "--samples: invalid int value: 'x'"),
    ("compare --samples 2.5", "--samples: invalid int value: '2.5'"),
    ("compare --lengths", "--lengths: expected at least one argument"),
    ("compare --lengths 512 512", "lengths=(512, 512): give different lengths, each above 32"),
    ("compare --lengths 16", "lengths=(16,): give different lengths, each above 32"),
    ("compare --timed-length 8", "timed_length=8: must be above the 32 decode steps"),
    ("compare --cache-dtype int8", "--cache-dtype: invalid choice: 'int8'"),
    ("compare --dtype float64", "--dtype: invalid choice: 'float64'"),
    ("compare --methods full full", "each may be given once"),
    ("compare --methods ojakv:steps=1000000000", "steps=1000000000: must be at most 1000"),
    ("compare --methods ojakv:sinks=1000000000000", "sinks=1000000000000: must be at most 268435456"),
    ("compare --json /dev/full", "/dev/full: is a character device; give a regular file"),
    ("compare --json {d}", "is a directory; give a regular file"),
    ("compare --json {d}/pipe", "pipe: is a pipe; give a regular file"),
    ("compare --json {d}/none/x.jsonl", "none/x.jsonl: No such file or directory"),
    ("compare --json ''", "--json '': must be a path that is not empty"),
    ("compare --json ~no-such-user/x.jsonl", "~no-such-user/x.jsonl: No such file or directory"),
    ("compare --plot {d}/folder.png", "folder.png: is a directory"),
    ("compare --plot {d}/x.exe", "no figure has the suffix '.exe', allowed are .png"),
    ("compare --plot ''", "--plot '': must be a path that is not empty"),
    ("compare --model ''", "--model '': must be a path that is not empty"),
    ("bench decode --peer jax", "--peer: invalid choice: 'jax'"),
    ("bench kernels --q-heads 3 --kv-heads 2", "--q-heads 3: must be a multiple of --kv-heads 2"),
    ("bench kernels --ops nothing", "--ops: invalid choice: 'nothing'"),
    ("bench kernels --json /dev/null", "/dev/null: is a character device"),
    ("bench compile --targets z80", "--targets: invalid choice: 'z80'"),
    ("bench compile --layers 2 0", "--layers 0: must be at least 1"),
    ("bench saves --folder {d}/none", "none: is no directory"),
    ("bench saves --methods nothing", "unknown method 'nothing'"),
    ("eval ruler --tasks nothing", "unknown RULER task 'nothing'"),
    ("eval ruler --protocol guess", "--protocol: invalid choice: 'guess'"),
    ("eval ruler --json /dev/null", "/dev/null: is a character device"),
    ("eval ruler --calibrate {d}/none.txt", "no such file"),
    ("eval longbench --tasks nothing", "unknown LongBench task 'nothing'"),
    ("eval longbench --max-length 1", "--max-length 1: must be at least 2"),
    ("eval needle --depths 1", "--depths 1: must be at least 2"),
    ("eval perplexity --text {d}/empty.txt", "holds no text"),
    ("eval perplexity --text {d}/latin.txt", "is not UTF-8 text (invalid continuation byte at byte 3)"),
    ("eval perplexity --text /dev/zero", "/dev/zero: is a character device"),
    ("eval perplexity --text {d}/none.txt", "no such file"),
    ("eval perplexity --text {d}/folder.png", "is a directory without a dataset"),
    ("eval perplexity --length 64 --step 64", "step=64: must lie in 1..63 for windows of 64 tokens"),
    ("eval outputs --length 64 --queries 64", "queries=64: must lie in 1..63 for windows of 64 tokens"),
    *((f"eval {name} --calibrate {{d}}/none.txt", "none.txt': no such file") for name in ("needle", "longbench")),
    ("eval perplexity --length 1", "--length 1: must be at least 2"),
    ("eval perplexity --mode backward", "--mode: invalid choice: 'backward'"),
    ("eval leaderboard", "required: --json"),
    ("eval leaderboard --json /dev/full", "/dev/full: is a character device"),
    ("eval leaderboard --json {d}/x.jsonl --markdown /dev/full", "/dev/full: is a character device"),
    ("eval leaderboard --json {d}/x.jsonl --presses snapkv:4x", "--presses: name their peer too, --peer kvpress"),
    ("falsify --rank nan", "--rank nan: must be a finite number"),
    ("falsify --rank 0", "--rank 0.0: must lie in (0, 1]"),
    ("falsify --thresholds 101", "--thresholds 101.0: must be at most 100"),
    ("falsify --lengths 512 --length 256", "--lengths 512: must be at most --length 256 for falsifier 3"),
    ("falsify --falsifiers 5", "--falsifiers: invalid choice: 5"),
    ("falsify --texts {d}/empty.txt", "--texts: expected 2 arguments"),
    ("streaming --ranks inf", "--ranks inf: must be a finite number"),
    ("streaming --ranks 2", "--ranks 2.0: must lie in (0, 1]"),
    ("streaming --studies nothing", "--studies: invalid choice: 'nothing'"),
    ("streaming --scored 1", "scored=1: must be at least 2"),
    ("streaming --samples -1", "samples=-1: must be at least 0"),
    ("cross-layer --energy 2", "--energy 2.0: must lie in (0, 1]"),
    ("cross-layer --latents 99999", "--latents 99999.0: must lie in (0, 1], a share"),
    ("cross-layer --ratios 0", "--ratios 0.0: must be above 0"),
    ("cross-layer --costs nothing", "unknown method 'nothing'"),
    *((f"cross-layer --{by} 64 {given}", f"{given}: is not read with --{by}; leave one of the two out")
      for by in ("quality", "sides")
      for given in ("--text t u", "--energy 0.9", "--latents 0.5", "--costs", "--length 512")),
    ("cross-layer --quality 64 --plot {d}/x.png", "x.png: is not read with --quality"),
    ("cross-layer --latents 0.5 --costs full", "--costs full: is not read with --latents"),
    ("cross-layer --latents 0.5 --groups 1 2", "--groups 1 2: is not read with --latents"),
    ("cross-layer --methods full", "--methods full: is not read without --quality; give that too"),
    ("cross-layer --sides 64 --methods full", "--methods full: is not read without --quality; give that too"),
    ("cross-layer --quality 64 --methods full --ratios 3", "--ratios 3.0: is not read with --methods"),
    ("cross-layer --cost-length 64", "--cost-length 64: is not read without --costs"),
    ("cross-layer --samples 2", "--samples 2: is not read without --quality or --sides"),
    ("estimators --page 600 --length 2048", "--page 600: must lie in 1..512, a quarter of --length"),
    ("estimators --rank 1.5", "--rank 1.5: must lie in (0, 1]"),
    ("eviction --budgets 64 --length 64", "budgets=[64]: each must lie in 1..63"),
    ("eviction --depths 1", "depths=1: must be at least 2"),
    ("eviction --protocol query-agnostic", "--protocol query-agnostic: is of the study tasks alone; give --studies tasks"),
    ("eviction --longbench {d}", ": is of the study tasks alone; give --studies tasks too"),
    ("eviction --tasks vt qa_1", "--tasks vt qa_1: is of the study tasks alone"),
    ("eviction --studies precision --length 16 --budgets 4", "--length 16: must be at least 32 for --studies precision"),
    ("diagnose --methods full", "'full' has no basis to diagnose"),
    ("diagnose --test {d}/empty.txt", "holds no text"),
    ("roofline --device abacus", "--device abacus: allowed are a100, h100"),
    ("roofline --bandwidth 0", "--bandwidth 0.0: must be positive"),
    ("roofline --flops 1e30", "--flops 1e+30: must be at most 1e+21"),
    ("calibrate --out {d}/x", "required: --method"),
    ("calibrate --method full --out {d}/x", "takes nothing from calibration"),
    ("calibrate --method ojakv --out ''", "--out '': must be a path that is not empty"),
    ("calibrate --method ojakv --out {d}/none/x", "none/x: No such file or directory"),
    ("calibrate --method ojakv --out {d}/{long}", "File name too long"),
    ("calibrate --method ojakv --out {d}", "choose another place"),
    ("calibrate --method ojakv --out {d}/empty.txt", "empty.txt is not a directory: choose another place"),
    ("calibrate --method ojakv --out {d}/x --bases-dtype int4", "--bases-dtype: invalid choice: 'int4'"),
    ("calibrate --method ojakv --out {d}/x --corpus {d}/empty.txt", "holds no text"),
    ("calibrate --method ojakv --out {d}/x --refine 10", "method 'ojakv' has no bases that can be refined"),
    ("calibrate --method transform:smaller=8 --out {d}/x --refine 10", "smaller=8.0 leaves the widths"),
    ("calibrate --method transform --out {d}/x --refine 1000001", "--refine 1000001: must be at most 1000000"),
    ("calibrate --method ojakv --out {d}/x --corpus /dev/zero", "/dev/zero: is a character device"),
    ("generate", "one of the arguments --prompt --prompt-file is required"),
    ("generate --prompt x --prompt-file y", "not allowed with argument --prompt"),
    ("generate --prompt ''", "the prompt is empty: give at least one token"),
    ("generate --prompt x --model {d}/none", "no such file or directory"),
    ("generate --prompt x --model {d}/empty.txt", "a model is a directory or a .gguf file"),
    ("generate --prompt x --model {d}/empty.gguf", "empty.gguf: truncated or not a GGUF file (0 bytes)"),
    ("generate --prompt x --model {d}/hf", "config.json: a JSON object is expected, got a list"),
    ("generate --prompt x --model {d}", "has no config.json"),
    ("generate --prompt x --model ~no-such-user", "no such file or directory"),
    ("generate --prompt x --temperature nan", "--temperature nan: must be a finite number"),
    ("generate --prompt x --temperature 1e-30", "temperature=1e-30: must be 0, which is greedy, or at least 1e-06"),
    ("generate --prompt x --top-k 0", "--top-k 0: must be at least 1"),
    ("generate --prompt x --top-p 2", "--top-p 2.0: must lie in (0, 1]"),
    ("generate --prompt x --seed -1", "--seed -1: must be at least 0"),
    ("generate --prompt x --max-new-tokens 1000000000000", "--max-new-tokens 1000000000000: must be at most 268435456"),
    ("generate --prompt x --mesh data=0", "mesh 'data=0': expected axis=size with axes data, model, tokens, sizes at least 1"),
    ("generate --prompt x --mesh ''", "mesh '': expected axis=size with axes data, model, tokens, sizes at least 1"),
    ("generate --prompt x --mesh rows=2", "mesh 'rows=2': expected axis=size"),
    ("generate --prompt x --mesh data=1000000", "mesh 'data=1000000' needs 1000000 devices, there are"),
    ("generate --prompt-file /dev/zero", "/dev/zero: is a character device"),
    ("generate --prompt-file {d}", "Is a directory"),
    ("generate --prompt-file {d}/empty.txt", "the prompt is empty: give at least one token"),
    ("generate --prompt-file {d}/latin.txt", "is not UTF-8 text"),
    ("generate --prompt-file {d}/{long}", "File name too long"),
    ("generate --prompt-file {d}/none.txt", "none.txt: No such file or directory"),
    ("serve --method nothing", "unknown method 'nothing'"),
    ("serve --memory 5", "--memory='5': must be a number and its unit"),
    ("serve --max-body 0MiB", "--max-body=0: must be at least 1"),
    ("serve --prompt 64 0", "--prompt 0: must be at least 1"),
    ("serve --port 65536", "--port 65536: must be at most 65535"),
    ("serve --port 0 --host 192.0.2.1", "--host 192.0.2.1 --port 0: Cannot assign requested address; must be an address of"),
    ("serve --port 0 --host no-such-host.invalid", "--host no-such-host.invalid: "),
    ("serve --port 0 --mesh ''", "mesh '': expected axis=size"),
    ("serve --port 0 --mesh rows=2", "mesh 'rows=2': expected axis=size"),
    ("serve --port 0 --model {d}/none", "no such file or directory"),
    ("inspect --prompt x --out {d}/x.exe", "x.exe: no figure has the suffix '.exe'"),
    ("inspect --prompt x --json /dev/full --out {d}/x.png", "/dev/full: is a character device"),
    ("inspect --prompt x --method nothing", "unknown method 'nothing'"),
    ("inspect --prompt x --out {d}/none/x.png", "No such file"),
    ("inspect --prompt-file {d}/empty.txt --out {d}/x.png", "the prompt is empty"),
    ("inspect --method full", "--prompt --prompt-file is required"),
    ("report", "required: RESULTS"),
    ("report /dev/zero", "/dev/zero: is a character device"),
    ("report {d}/none.jsonl", "none.jsonl: No such file or directory"),
    ("report {d}", "Is a directory"),
    ("report {d}/empty.txt", "no record with a score or a likelihood"),
    ("report {d}/deep.json", "no record with a score or a likelihood"),
    ("report {d}/latin.txt", "is not UTF-8 text"),
    ("report {d}/score.jsonl --baseline nothing", "baseline 'nothing': no record has this method, only full"),
    ("report {d}/score.jsonl --tasks nothing", "no record has the task 'nothing', only t"),
    ("report {d}/score.jsonl --out ''", "--out '': must be a path that is not empty"),
    ("report {d}/score.jsonl --out {d}/empty.txt", "empty.txt: is no directory"),
    ("report {d}/score.jsonl --out {d}/own", "own/report.md: is there, and this command did not write it"),
    ("report {d}/score.jsonl --out {d}/drawn", "drawn/1-pareto.png: is there and no PNG file; give another name"),
    ("compare --plot {d}/photo.png", "photo.png: is there and no PNG file; give another name"),
    ("inspect --prompt x --out {d}/photo.png", "photo.png: is there and no PNG file; give another name"),
    ("eval leaderboard --json {d}/new.jsonl --markdown {d}/notes.md", "notes.md: is there, and this command did not write it"),
    ("compare --json {d}/foreign.jsonl", "foreign.jsonl: holds no records of this program; give another file"),
    ("compare --json {d}/deep.json", "deep.json: holds no records of this program; give another file"),
    ("compare --json {d}/new.png --plot {d}/new.png", "--json and --plot are one file"),
    ("eval leaderboard --json {d}/score.jsonl --markdown {d}/score.jsonl", "--json and --markdown are one file"),
    ("eval leaderboard --json {d}/new.jsonl --methods none", "--methods none: without --peer nothing is left to evaluate"),
    ("calibrate --method ojakv --out {d}/new --corpus ''", "--corpus '': must be a path that is not empty"),
    ("generate --prompt x --temperature 1 --top-k 4294967296", "--top-k 4294967296: must be at most 268435456"),
)


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        refused_command(capsys, ["serve", "--port", port], f"--host 127.0.0.1 --port {port}: Address already in use; must be")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    (path / "empty.txt").touch()
    (path / "empty.gguf").touch()
    (path / "latin.txt").write_bytes(b"caf\xe9 x")
    (path / "deep.json").write_text("[" * 100_000)
    (path / "score.jsonl").write_text('{"command": "c", "model": "m", "method": "full", "task": "t", "score": 1}\n')
    (path / "folder.png").mkdir()
    (path / "photo.png").write_text("JFIF")
    (path / "notes.md").write_text("mine")
    (path / "foreign.jsonl").write_text('{"command": "ls", "rc": 0}\n')
    (path / "drawn").mkdir()
    (path / "drawn" / "1-pareto.png").write_text("JFIF")
    (path / "own").mkdir()
    (path / "own" / "report.md").write_text("mine")
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text("[]")
    os.mkfifo(path / "pipe")
    return path


def test_after_an_interrupt_nothing_runs_any_more():
    code = ("import atexit, os; atexit.register(os.abort)\nimport lowrank_kv_jax.cli.__main__ as program\n"
            "program.main = lambda: 130\nprogram.program()")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 130


def test_an_interrupt_before_jax_is_there_ends_at_once():
    code = ("import os, signal, time, lowrank_kv_jax.cli.__main__ as program\n"
            "program.main = lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(9)\nprogram.program()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "lowrank-kv: interrupted\n")


def test_a_jax_that_cannot_be_imported_is_told_in_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no such wheel')")
    command = [sys.executable, "-m", "lowrank_kv_jax.cli", "generate", "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "ImportError: no such wheel" in done.stderr


class Panic(BaseException):
    """As the code in Rust behind tokenizers raises it."""


@pytest.mark.parametrize("error, code, words", (
    (RuntimeError("first\nsecond"), 1, "RuntimeError: first second (not foreseen; --debug shows where it arose)"),
    (KeyError("field"), 1, "KeyError: 'field' (not foreseen; --debug"), (MemoryError(), 1, "MemoryError: MemoryError (not foreseen"),
    (RecursionError("too deep"), 1, "RecursionError: too deep (not foreseen"), (AssertionError(), 1, "AssertionError: "),
    (OverflowError("int too large"), 1, "OverflowError: int too large (not foreseen"), (Panic("no entry"), 1, "Panic: no entry (not foreseen"),
    (RuntimeError("x" * 10**6), 1, "xxx ... (--debug shows all of it)"), (ValueError("field=1: must be 2"), 2, "error: field=1: must be 2"),
    (OSError(28, "No space left on device", "/x/y.png"), 1, "/x/y.png: No space left on device"),
    (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied"),
), ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")
def test_whatever_fails_ends_in_one_line(error, code, words, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("lowrank_kv_jax.cli.methods.run", fail)
    refused_command(capsys, ["methods"], words, code=code)
    with pytest.raises(SystemExit):
        refused_command(capsys, ["--version"])


@pytest.mark.parametrize("line, words", TABLE, ids=[line or "nothing" for line, _ in TABLE])
def test_commands(line, words, place, capsys, monkeypatch):
    if "--model" not in line:
        monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", None)
    before = sorted(path.name for path in place.iterdir())
    refused_command(capsys, ["" if word == "''" else word for word in line.format(d=place, long='x' * 300).split()], words)
    assert sorted(path.name for path in place.iterdir()) == before
