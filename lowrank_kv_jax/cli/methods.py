"""`lowrank-kv methods`: every registered method with its fields and defaults."""

import argparse
import dataclasses

HELP = "list the methods, their fields and defaults"
COMPOSITIONS = """compositions
    Spelled codec+selection+summary: how tokens are stored, which stay, what stands for the rest. The summary is
    moments[:order=0|1|gaussian]; codec and summary may be left out.
    e.g. kivi:bits=4+kvzip:keep=0.25, ojakv:rank=0.6+snapkv:keep=0.5, h2o:keep=0.25+moments"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("methods", help=HELP, description=HELP)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these, with their whole documentation")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print them.

    Raises:
        ValueError: an unknown name.
    """
    from lowrank_kv_jax.methods import REGISTRY
    from lowrank_kv_jax.methods.parse import parse_method

    if args.names:
        for name in args.names:
            print(describe(type(parse_method(name)), whole=True), end="\n\n")
        return 0
    print("\n\n".join(describe(REGISTRY[name]) for name in sorted(REGISTRY)), COMPOSITIONS, sep="\n\n")
    return 0


def describe(cls, whole: bool = False) -> str:
    """Name, first line (or all) of the documentation, fields with defaults."""
    import inspect
    import textwrap

    text = inspect.getdoc(cls) or ""
    if not whole:
        text = " ".join(text.split("\n\n")[0].split())
    needs = "needs calibrated bases; " if cls.calibrated else ""
    fields = ", ".join(f"{f.name}={_value(f.default)}" for f in dataclasses.fields(cls)) or "no fields"
    body = text if whole else textwrap.fill(text, 106)
    lines = [body, textwrap.fill(needs + fields, 106)]
    if cls.presets:
        lines.append(textwrap.fill("presets: " + ", ".join(cls.presets), 106, break_on_hyphens=False))
    if cls.stage:
        lines.append(f"{cls.stage} of compositions")
    return f"{cls.name}\n" + textwrap.indent("\n".join(lines), "    ")


def _value(value) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
