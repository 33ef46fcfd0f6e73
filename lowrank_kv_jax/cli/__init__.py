"""The program `lowrank-kv`: a command is a module with `add_parser` and `run`, imported when it is used."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "compare": "what each method costs and keeps, beside the full cache",
    "methods": "list the methods, their fields and defaults",
    "generate": "generate text from a compressed cache",
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
    """Run a command.

    Returns:
        The exit code: 0, 2 for a mistake in what was asked for, 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _prepare_environment()
    try:
        args = _parser(argv).parse_args(argv)
        return args.run(args) or 0
    except (ValueError, TypeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_is_gone()
        if os.environ.get("LOWRANK_KV_TRACEBACK"):
            raise
        print(f"lowrank-kv: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lowrank-kv: interrupted", file=sys.stderr)
        return 130


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that is asked for is imported, so that help is there at once."""
    parser = argparse.ArgumentParser(
        prog="lowrank-kv", description="Compressed KV caches in JAX: compare, generate, calibrate, measure.",
        epilog="A method is spelled name or name:field=value,field=value, e.g. ojakv:rank=0.5,rope=pre. "
               "Mistakes are told in one line; LOWRANK_KV_TRACEBACK=1 shows where they arose.",
    )
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _reader_is_gone() -> int:
    """`lowrank-kv methods | head`: what the reader no longer wants is dropped without complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
