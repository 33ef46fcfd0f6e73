"""Options that several commands share."""

import argparse
from typing import Any


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


def corpus_of(value: list[str] | None, default: str) -> str | tuple[str, ...]:
    """One or several corpora as `load_corpus` takes them."""
    if value is None:
        return default
    return value[0] if len(value) == 1 else tuple(value)


def device_line() -> str:
    """What was measured on."""
    from lowrank_kv_jax.evals.records import device, versions

    return f"{device()}, jax {versions()['jax']}"
