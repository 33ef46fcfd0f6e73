"""The only door to transformers: its tokenizers, imported late (seconds), quietly, and without torch."""

import os
from pathlib import Path


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
        try:
            return fast.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
            raise ValueError(f"{directory}: cannot read its tokenizer ({error})") from error
    if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"{directory}: cannot read its tokenizer ({error})") from error
