"""`lowrank-kv methods`: every registered method with its fields and defaults."""

import argparse
import textwrap
from typing import Any

HELP = "list the methods, their fields and defaults"
WIDTH = 106
COMPOSITIONS = """compositions
    Spelled codec+selection+summary: how tokens are stored, which stay, what stands for the rest. The summary is
    moments[:order=0|1|gaussian]; codec and summary may be left out.
    e.g. kivi:bits=4+kvzip:keep=0.25, ojakv:rank=0.6+snapkv:keep=0.5, h2o:keep=0.25+moments"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("methods", help=HELP, description=HELP)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="only these, with their whole documentation; of a composition (codec+selection) each part")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print them.

    Raises:
        ValueError: an unknown name.
    """
    from lowrank_kv_jax.methods import REGISTRY
    from lowrank_kv_jax.methods.parse import parse_method
    from lowrank_kv_jax.summaries.component import SUMMARIES

    if args.names:
        for name in args.names:  # a summary is no method by itself
            parts = (SUMMARIES[name]() if name in SUMMARIES else parse_method(name),)
            for part in getattr(parts[0], "parts", parts):
                print(describe_whole(type(part)), end="\n\n")
        return 0
    print("\n\n".join(describe(REGISTRY[name]) for name in sorted(REGISTRY)), COMPOSITIONS, sep="\n\n")
    return 0


def describe(cls: type) -> str:
    """Name, first line of the documentation, fields with defaults."""
    from lowrank_kv_jax.methods.fields import fields_of, without_fields

    text = " ".join(without_fields(cls).split("\n\n")[0].split())
    needs = "needs calibrated bases; " if getattr(cls, "calibrated", False) else ""
    fields = ", ".join(f"{field.name}={field.default}" for field in fields_of(cls)) or "no fields"
    return _block(cls, [textwrap.fill(text, WIDTH), textwrap.fill(needs + fields, WIDTH)])


def describe_whole(cls: type) -> str:
    """Name, documentation, and each field, inherited ones too, with its default, its types and what is allowed."""
    from lowrank_kv_jax.methods.fields import fields_of, without_fields

    lines = [without_fields(cls), ""]
    if getattr(cls, "calibrated", False):
        lines.append("needs calibrated bases")
    for field in fields_of(cls):
        text = f"{field.name}={field.default} ({field.kinds}): {field.text}"
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    return _block(cls, lines)


def _block(cls: Any, lines: list[str]) -> str:
    if getattr(cls, "presets", None):
        lines.append(textwrap.fill("presets: " + ", ".join(cls.presets), WIDTH, break_on_hyphens=False))
    if cls.stage:
        lines.append(f"{cls.stage} of compositions")
    return f"{cls.name}\n" + textwrap.indent("\n".join(lines), "    ")
