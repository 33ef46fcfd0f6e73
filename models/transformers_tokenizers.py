"""The only door to transformers: its tokenizers, imported late (seconds), quietly, and without torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fast_tokenizer_class():
    """`PreTrainedTokenizerFast`. Its import pulls in no framework, unlike that of `AutoTokenizer`."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # else the first import says that torch is missing
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return PreTrainedTokenizerFast


def directory_tokenizer(directory: Path):
    """The tokenizer of an HF model directory, `None` where it has no tokenizer files.

    `tokenizer.json` is taken as it is. Only directories without one go through `AutoTokenizer` (which imports
    torch where torch is installed) to convert the older formats.
    """
    fast = fast_tokenizer_class()
    if (directory / "tokenizer.json").is_file():
        return usable_tokenizer(directory, lambda: fast.from_pretrained(str(directory), local_files_only=True))
    if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    return usable_tokenizer(directory, lambda: AutoTokenizer.from_pretrained(str(directory), **options))


def usable_tokenizer(place: Path, make: Callable[[], Any]) -> Any:
    """The tokenizer that `make` returns, once it has encoded something; whatever it fails with is damage of `place`.

    The tokenizers library raises bare Exception, and where its own code panics what is derived from BaseException alone.

    Raises:
        ValueError: it cannot be made, or does not work.
    """
    try:
        tokenizer = make()
        tokenizer("a", verbose=False)
        return tokenizer
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, ValueError) and str(error).startswith(str(place)):
            raise  # our own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{place}: cannot read its tokenizer ({reason})") from error
