"""Names and numbers that no text holds twice: what a prompt is asked for, and a corpus hardly shows.

A key, a hash or the digits of an account lie off the directions that running text takes. Where bases are calibrated on
such strings, too, an error of their tokens is about that of all others.
"""

import string
import uuid
from typing import Any

import numpy as np

SHARE = 0.2
"""Of the tokens, those that belong to identifiers."""
HEXADECIMAL = "0123456789abcdef"
KINDS = (
    (HEXADECIMAL, (8, 40), (1, 1), ""),
    (string.digits, (3, 12), (1, 1), ""),
    (string.ascii_letters + string.digits + "+/", (6, 24), (1, 1), ""),
    (string.ascii_lowercase, (4, 11), (1, 1), ""),
    (string.ascii_uppercase, (2, 8), (1, 1), ""),
    (string.digits, (1, 4), (2, 6), ".,:-/"),
    (string.ascii_lowercase, (3, 8), (2, 4), "._-/@"),
)
"""Characters, the fewest and the most of a part, of parts, and what joins them; one more kind is a UUID."""
ENDS = ("", ",", ".", "\n")


def with_identifiers(texts: np.ndarray, tokenizer: Any, seed: int = 0) -> np.ndarray:
    """Texts of as many tokens `[n, R]` among which identifiers stand, drawn at random; what they push out is lost.

    Args:
        texts: int32 `[n, R]`. The first token of each stays.
        tokenizer: None leaves the texts alone.
    """
    if tokenizer is None:
        return texts
    rng = np.random.default_rng(seed)
    return np.stack([_mixed(text, tokenizer, rng) for text in texts])


def _mixed(text: np.ndarray, tokenizer: Any, rng: np.random.Generator) -> np.ndarray:
    out, taken = [text[:1]], 1
    while taken < len(text):
        ids = tokenizer(" " + identifier(rng) + ENDS[rng.integers(len(ENDS))], add_special_tokens=False).input_ids
        gap = 1 + int(rng.exponential(len(ids) * (1 - SHARE) / SHARE))
        out += [text[taken : taken + gap], np.asarray(ids, text.dtype)]
        taken += gap
    return np.concatenate(out)[: len(text)]


def identifier(rng: np.random.Generator) -> str:
    """One of `KINDS`, or a UUID."""
    kind = int(rng.integers(len(KINDS) + 1))
    if kind == len(KINDS):
        return str(uuid.UUID(_drawn(HEXADECIMAL, (32, 32), rng)))
    characters, length, parts, joints = KINDS[kind]
    joint = joints and str(rng.choice(list(joints)))
    return joint.join(_drawn(characters, length, rng) for _ in range(_within(parts, rng)))


def _drawn(characters: str, length: tuple[int, int], rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(characters), _within(length, rng)))


def _within(ends: tuple[int, int], rng: np.random.Generator) -> int:
    return int(rng.integers(ends[0], ends[1] + 1))
