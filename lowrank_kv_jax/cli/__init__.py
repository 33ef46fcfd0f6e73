"""The program `lowrank-kv`: a command is a module with `add_parser` and `run`, imported when it is used."""

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from lowrank_kv_jax.cli.bounds import check_bounds
from lowrank_kv_jax.cli.imports import import_modules, take_imports

COMMANDS = {
    "compare": "what each method costs and keeps, beside the full cache",
    "methods": "list the methods, their fields and defaults",
    "generate": "generate text from a compressed cache",
    "serve": "an OpenAI-compatible server on compressed caches",
    "inspect": "which tokens of a prompt each layer holds, and how: a picture and a table",
    "calibrate": "fit the bases of a method to texts and save them",
    "diagnose": "how compressible the cache is, and how bases follow a shift of the text",
    "eviction": "what eviction costs, and what the moments of the evicted recover",
    "eval": "benchmarks through compressed caches",
    "report": "tables and figures from the records of evaluations",
    "cross-layer": "what the layers' caches share (CKA, cosine, ranks), and what sharing a basis costs",
    "estimators": "where bases can come from, compared: error, time, bytes",
    "falsify": "the four falsifiers of Online Subspace Projection, with a verdict for each",
    "streaming": "StreamingKV beside Palu: quality after a shift, ablations, Fisher overlap, speed",
    "roofline": "FLOPs and bytes of a decoded token of any method, counted without running it",
    "bench": "speed: time to first token and decode tokens/s; the attention kernels",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Whatever goes wrong is told in one line; with `--debug`, where it arose stands before it.

    Returns:
        The exit code: 0, 2 for a mistake in what was asked for, 130 after Ctrl-C, 1 for all else that fails.
    """
    argv, debug = _without_debug(sys.argv[1:] if argv is None else argv)
    try:
        argv, modules = take_imports(argv)
        _prepare_environment()
        import_modules(modules)
        args = _parser(argv).parse_args(argv)
        check_bounds(args)
        code = args.run(args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # a reader that is gone or a full disk, while something can be said
        return code
    except BrokenPipeError:
        return _drop_output(0)
    except KeyboardInterrupt:
        print("lowrank-kv: interrupted", file=sys.stderr, flush=True)
        return _drop_output(INTERRUPTED)
    except SystemExit:  # --help and --version
        raise
    except BaseException as error:  # code in Rust panics with what is no Exception
        if debug:
            traceback.print_exc()
        return _drop_output(_tell(error, debug))


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, which may stand anywhere before `--`, and whether it stood there."""
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    return [word for word in argv[:end] if word != "--debug"] + argv[end:], "--debug" in argv[:end]


def _tell(error: BaseException, debug: bool) -> int:
    """One line on standard error; the exit code."""
    fault = getattr(sys.modules.get("lowrank_kv_jax.method"), "Fault", ())  # what cannot be imported has not raised it
    text = _one_line(error)
    foreseen = isinstance(error, (ValueError, OSError))
    if not foreseen:
        text = f"{type(error).__name__}: {text}"
    if len(text) > LONGEST and not debug:
        text = text[:LONGEST] + " ... (--debug shows all of it)"
    elif not foreseen and not debug:
        text += " (not foreseen; --debug shows where it arose)"
    print(f"lowrank-kv: error: {text}", file=sys.stderr)
    asked = isinstance(error, (ValueError, *_ASKED)) or getattr(error, "errno", None) in _NAMES
    return 2 if asked and not isinstance(error, fault) else 1


INTERRUPTED = 130
"""The exit code after Ctrl-C."""

LONGEST = 2000
"""Characters of a message."""

_ASKED = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of the system that another argument mends."""

_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
"""Of names that no file can have, which have no class of their own."""


class Parser(argparse.ArgumentParser):
    """One whose mistakes are told like all others."""

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # pyright: ignore
        """As of argparse, but an option that there is not is named before the command that is missing."""
        first = args[0].split("=")[0] if args else ""
        if first.startswith("-") and not any(known.startswith(first) for known in ("--", *self._option_string_actions)):
            self.error(f"unrecognized arguments: {args[0]}")
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._of_command(found).error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _of_command(self, found: argparse.Namespace) -> "Parser":
        """That of the command whose arguments these are, whose help knows what there is."""
        parser = self
        while below := next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None):
            parser = below.choices[getattr(found, below.dest)]
        return parser

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(f"{message}; see `{self.prog} --help`")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that is asked for is imported, so that help is there at once."""
    parser = Parser(
        prog="lowrank-kv", description="Compressed KV caches in JAX: compare, generate, calibrate, measure.",
        epilog="A method is spelled name or name:field=value,field=value, e.g. ojakv:rank=0.5,rope=pre. "
               "Mistakes are told in one line; with --debug, anywhere, where they arose stands before it.",
    )
    parser.add_argument("--debug", action="store_true", help="show where an error arose")
    parser.add_argument("--import", metavar="MODULE", help="import a module of yours first, for the methods it registers")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = argv[0] if argv else None
    for name, summary in COMMANDS.items():
        if name == asked:
            module = importlib.import_module(f"lowrank_kv_jax.cli.{name.replace('-', '_')}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def _version() -> str:
    import lowrank_kv_jax

    return lowrank_kv_jax.__version__


def _prepare_environment() -> None:
    """Settings that libraries read when they are imported; what the user has set stays."""
    # models run on JAX: transformers need not say that it found no torch
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Matrices of a few hundred rows gain nothing from LAPACK's own threads. When other work shares the cores
    # these wait for each other, and a decomposition takes fifty times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, bytes)):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return f"standard output: {error.strerror}"  # whatever else is written to names its file
    return " ".join(str(error).split()) or type(error).__name__


def _drop_output(code: int) -> int:
    """Forget what standard output still holds: a reader that has gone (`| head`) or a full disk does not want it."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return code
        with contextlib.suppress(OSError, ValueError):  # ValueError: not a file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
