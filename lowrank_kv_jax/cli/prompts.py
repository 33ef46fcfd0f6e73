"""Prompts on the command line, and the bases of the method that reads them."""

import argparse
import sys
from typing import Any

from lowrank_kv_jax.checks.shown import check_text
from lowrank_kv_jax.files import read_text


def add_prompt_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """What is read, and how: `--prompt` (`several` make a batch) or `--prompt-file`; bases; the dtype of the cache."""
    from lowrank_kv_jax.storage.cache_dtype import CACHE_DTYPES, default_cache_dtype

    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", nargs="+" if several else 1,
                        help="several make a batch" if several else "the text itself")
    prompt.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - is standard input")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--bases", metavar="DIR",
                        help="of `lowrank-kv calibrate`, for methods that need them")
    parser.add_argument("--calibrate", nargs="+", metavar="TEXT",
                        help="without --bases: what to fit them to; by default Python's language reference")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default=default_cache_dtype(),
                        help="(%(default)s)")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The texts of `--prompt`, or that of `--prompt-file`.

    Raises:
        ValueError: an empty one, or one that is not UTF-8; OSError: no such file.
    """
    if args.prompt is not None:
        texts = args.prompt
    elif args.prompt_file == "-":
        try:
            texts = [sys.stdin.read()]
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error
    else:
        texts = [read_text(args.prompt_file)]
    if not all(texts):
        raise ValueError("the prompt is empty: give at least one token")
    for text in texts:
        check_text("--prompt", text, " ")  # Python reads bytes of an argument that are not UTF-8 as such halves
    return texts


def encode_texts(model: Any, texts: list[str], chat: bool) -> list[list[int]]:
    """Ids of each text, in the model's chat template if asked for.

    Raises:
        ValueError: no tokenizer, or one without a chat template.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(f"model {model.name!r} has no tokenizer")
    if not chat:
        return [list(tokenizer(text, verbose=False).input_ids) for text in texts]
    if not tokenizer.chat_template:
        raise ValueError("--chat: this model's tokenizer has no chat template")
    from lowrank_kv_jax.evals.asking.prompts import user_turn

    turns = (user_turn(tokenizer, text) for text in texts)
    return [list(tokenizer(turn, add_special_tokens=False, verbose=False).input_ids) for turn in turns]


def bases_from(args: argparse.Namespace, model: Any, method: Any) -> Any:
    """The bases of `--bases`, or fitted to `--calibrate` where the method needs some; None where it does not.

    Raises:
        ValueError: an option that the method has no use for; ValueError, OSError: as `load_bases` and `load_corpus`.
    """
    for option, value in (("--bases", args.bases), ("--calibrate", args.calibrate)):
        if value and not method.calibrated:
            raise ValueError(f"{option}: {method.name} has no bases that are calibrated; leave it out")
    if args.bases:
        from lowrank_kv_jax.saving.saved_bases import load_bases

        return load_bases(args.bases, model, method)
    if not method.calibrated:
        return None
    from lowrank_kv_jax.calibration.corpus import load_corpus
    from lowrank_kv_jax.evals.asking.methods import bases_of

    print(f"[{args.method} needs bases: calibrating now; `lowrank-kv calibrate` does it once for all]",
          file=sys.stderr)
    return bases_of(model, {args.method: method}, load_corpus(args.calibrate), progress=True)[args.method]
