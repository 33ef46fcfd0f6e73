"""What the metadata of a GGUF file may say of its tokenizer."""

from typing import Any

from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.models.gguf_file import GgufFile

LONGEST = 1024
"""Characters of a token; every place to cut one is looked at, and vocabularies hold some of dozens."""

_LISTS = {"tokens": (str, "strings"), "merges": (str, "strings"), "scores": ((int, float), "numbers"),
          "token_type": (int, "integers")}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def check_tokenizer(file: GgufFile) -> None:
    """Raise ValueError for the first field of the tokenizer that is not what it must be; one that is missing passes."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    for name, (kind, what) in _LISTS.items():
        value = fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise _wrong(file, name, value, f"a list of {what}")
    tokens = fields.get("tokens", [])
    for name in ("scores", "token_type"):
        if fields.get(name) and len(fields[name]) != len(tokens):
            raise _wrong(file, name, fields[name], f"one of each of the {len(tokens)} tokens, has {len(fields[name])}")
    for number, token in enumerate(tokens):
        if len(token) > LONGEST:
            raise _wrong(file, f"tokens[{number}]", token, f"of at most {LONGEST} characters")
    for name in _FLAGS:
        if not isinstance(fields.get(name, False), bool):
            raise _wrong(file, name, fields[name], "true or false")
    for name in (f"{name}_token_id" for name in _IDS):
        value = fields.get(name, 0)
        if tokens and (type(value) is not int or not 0 <= value < len(tokens)):
            raise _wrong(file, name, value, f"an integer in 0..{len(tokens) - 1}")
    template = file.metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ValueError(f"{file.path}: tokenizer.chat_template={short(template)}: must be a string")


def _wrong(file: GgufFile, name: str, value: Any, allowed: str) -> ValueError:
    return ValueError(f"{file.path}: tokenizer.ggml.{name}={short(value)}: must be {allowed}")
