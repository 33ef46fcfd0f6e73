"""Options that several commands share."""

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WINDOW = 2048
"""Tokens of a window that is calibrated on, where the context holds so many and `--length` was not given."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--model` and `--dtype`."""
    parser.add_argument("--model", default="smollm2-135m",
                        help="name, directory, .gguf file or hub id (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"),
                        help="of the weights; by default float32 on CPU and bfloat16 on accelerators")


def load_from(args: argparse.Namespace, mesh: Any = None) -> Any:
    """The model that the options name; compiled programs are cached from here on."""
    from lowrank_kv_jax.cli.compilation_cache import enable_compilation_cache
    from lowrank_kv_jax.models.load import load_model

    enable_compilation_cache()
    return load_model(args.model, args.dtype, mesh)


def check_numbers(args: argparse.Namespace, **least: int) -> None:
    """Refuse options below their least values before a model is loaded; of several values each is looked at.

    Raises:
        ValueError: the first one that is below; options that were not given pass.
    """
    for name, bound in least.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < bound:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")


def check_context(args: argparse.Namespace, model: Any, **behind: int) -> None:
    """Refuse options that name more tokens than the model's context holds with those that follow them, before anything is
    measured.

    Raises:
        ValueError: the first one that does; options that were not given pass.
    """
    context = model.config.context
    for name, further in behind.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value + further > context:
                room = f" less {further} that follow" if further else ""
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at most {context - further}, the model's "
                                 f"context of {context} tokens{room}")


def window_length(args: argparse.Namespace, model: Any) -> int:
    """Tokens of a window: those of `--length`, which the model's context must hold, or by default `WINDOW`, if it does.

    Raises:
        ValueError: as `check_context`.
    """
    check_context(args, model, length=0)
    return args.length or min(WINDOW, model.config.context)


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse files of `--json`, `--plot` and others now rather than after minutes of measuring.

    Raises:
        ValueError: two options name one file, or as `check_appendable` and `check_plot`; OSError: as these.
    """
    from lowrank_kv_jax.evals.results.records import check_appendable, check_writable
    from lowrank_kv_jax.files import behind_links

    given = {name: getattr(args, name) for name in ("json", "plot", "markdown", "out") if getattr(args, name, None)}
    seen: dict[Path, str] = {}
    for name, path in given.items():
        other = seen.setdefault(behind_links(path), name)
        if other != name:
            raise ValueError(f"--{other} and --{name} are one file, {path}: give each its own")
    if "json" in given:
        check_appendable(given["json"])
    if "plot" in given:
        check_plot(given["plot"])
    if "markdown" in given:
        check_writable(given["markdown"])


def append_records(args: argparse.Namespace, command: str, rows: Iterable[Mapping[str, Any]], **common: Any) -> None:
    """Append a record of each row to the file of `--json`, if there is one.

    Values of a row go before common ones; its `spec` is the record's method.
    """
    from lowrank_kv_jax.evals.results.records import append_record, make_record

    if args.json:
        for row in rows:
            values = {"method" if name == "spec" else name: value for name, value in row.items()}
            append_record(args.json, make_record(command, **{**common, **values}))


def check_plot(path: str | os.PathLike, option: str = "--plot") -> None:
    """Refuse what no figure can be saved to, in the words of `option`.

    Raises:
        ValueError: none of `FORMATS`, something else of this name, or matplotlib is not installed; OSError: the file
            cannot be written.
    """
    from lowrank_kv_jax.checks.extras import check_extra
    from lowrank_kv_jax.evals.results.figure_file import FORMATS, check_figure
    from lowrank_kv_jax.evals.results.records import check_writable

    suffix = Path(path).suffix
    if suffix.lower() not in FORMATS:
        raise ValueError(f"{option} {os.fspath(path)}: no figure has the suffix {suffix!r}, allowed are "
                         f"{' '.join(FORMATS)}")
    check_extra("matplotlib", f"{option} {os.fspath(path)}")
    check_figure(path)
    check_writable(path)


def corpus_of(value: list[str] | None, default: str) -> str | tuple[str, ...]:
    """One or several corpora as `load_corpus` takes them."""
    if value is None:
        return default
    return value[0] if len(value) == 1 else tuple(value)


def device_line() -> str:
    """What was measured on."""
    from lowrank_kv_jax.evals.results.records import device, versions

    return f"{device()}, jax {versions()['jax']}"
