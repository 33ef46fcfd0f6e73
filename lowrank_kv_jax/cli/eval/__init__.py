"""`lowrank-kv eval`: benchmarks through compressed caches, each a module of this package."""

import argparse
import importlib

HELP = "benchmarks through compressed caches"

BENCHMARKS = ("ruler", "longbench", "perplexity", "outputs", "lm-eval", "needle", "retention", "leaderboard")


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("eval", help=HELP, description=HELP)
    nested = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name in BENCHMARKS:
        importlib.import_module(f"lowrank_kv_jax.cli.eval.{name.replace('-', '_')}").add_parser(nested)
    return parser
