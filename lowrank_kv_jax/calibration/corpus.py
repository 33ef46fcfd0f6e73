"""Texts to calibrate and to measure on: files, Hugging Face datasets, or what comes with Python."""

import dataclasses
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from lowrank_kv_jax.checks.extras import check_extra
from lowrank_kv_jax.checks.hub import quiet_hub
from lowrank_kv_jax.checks.shown import check_text, short
from lowrank_kv_jax.files import expanded, read_text

DEFAULT_CORPUS = "pydoc"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
TEXT_SUFFIXES = (".txt", ".md", ".raw", ".tokens", ".py")  # missing files, not datasets of the hub


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts and where they come from.

    Attributes:
        texts: the documents, none of them empty.
        name: as it was asked for.
        sha256: of the documents in order, hexadecimal.
    """

    texts: tuple[str, ...]
    name: str
    sha256: str

    @classmethod
    def of(cls, texts: Sequence[str], name: str = "texts") -> "Corpus":
        """A corpus of given documents; blank ones are left out.

        Raises:
            ValueError: nothing is left, or a text is no UTF-8; TypeError: something is not a string.
        """
        several = isinstance(texts, Iterable) and not isinstance(texts, str)
        wrong = [text for text in texts if not isinstance(text, str)] if several else [texts]
        if wrong:
            raise TypeError(f"corpus {name!r} holds {short(wrong[0])}: must be a sequence of strings, the texts "
                            "themselves; `load_corpus` reads files")
        kept = tuple(text for text in texts if text.strip())
        if not kept:
            raise ValueError(f"corpus {name!r}: holds no text")
        digest = hashlib.sha256()
        for text in kept:
            check_text(f"corpus {name!r}", text, " holds ")
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return cls(kept, name, digest.hexdigest())


def load_corpus(source: str | os.PathLike | Sequence[str | os.PathLike] | None = None) -> Corpus:
    """Read a corpus.

    Args:
        source: one or several of: a path to a UTF-8 text file; a built-in name, "pydoc" (the language
            reference that comes with Python, technical prose, the default), "pydoc:first" and "pydoc:second"
            (its halves, to calibrate on one and test on the other) or "python" (source code of the standard
            library); a dataset of the Hugging Face hub as "organisation/name[:config[:split]]", by default
            its train split; a folder that `datasets` saved, or that holds its data files (.jsonl, .parquet, ...).

    Raises:
        FileNotFoundError: neither a file nor a built-in name nor a dataset that is cached or can be reached.
        ValueError: a file that is not UTF-8 text, a folder or dataset without text, or nothing but white space;
            a dataset without the extra `datasets`.
    """
    source = DEFAULT_CORPUS if source is None else source
    names = [os.fspath(part) for part in ([source] if isinstance(source, str | os.PathLike) else source)]
    if "" in names:
        raise ValueError("corpus '': must be a name or a path that is not empty")
    return Corpus.of([text for name in names for text in _read(name)], "+".join(names))


def _read(name: str) -> list[str]:
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = expanded(name)
    if path.is_dir():
        return _read_folder(name, path)
    if path.exists():
        try:
            return [read_text(path)]
        except ValueError as error:
            raise ValueError(f"corpus {name!r}: {error}") from error
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]*){0,2}", name) and path.suffix not in TEXT_SUFFIXES:
        return _read_dataset(name)
    raise FileNotFoundError(f"corpus {name!r}: no such file, not one of {', '.join(BUILT_IN)}, and not a "
                            "dataset of the form organisation/name[:config[:split]]")


def _read_dataset(name: str) -> list[str]:
    """The rows of a dataset's text column."""
    check_extra("datasets", f"corpus {name!r}, a dataset of the hub")
    import datasets  # slow to import, and only needed here

    repository, config, split = (name.split(":") + ["", ""])[:3]
    return _text_column(name, lambda: datasets.load_dataset(repository, config or None, split=split or "train"))


def _read_folder(name: str, path: Path) -> list[str]:
    """The train split of a dataset in a folder."""
    if not any(file.suffix in DATA_SUFFIXES for file in path.rglob("*")):
        raise ValueError(f"corpus {name!r}: is a directory without a dataset ({', '.join(DATA_SUFFIXES)}, or what "
                         "save_to_disk writes); name its text files")
    check_extra("datasets", f"corpus {name!r}, a folder of data files")
    import datasets

    if (path / "dataset_dict.json").is_file():
        return _text_column(name, lambda: datasets.load_from_disk(os.fspath(path))["train"])
    if (path / "dataset_info.json").is_file():
        return _text_column(name, lambda: datasets.load_from_disk(os.fspath(path)))
    return _text_column(name, lambda: datasets.load_dataset(os.fspath(path.resolve()), split="train"))


def _text_column(name: str, load: Callable[[], Any]) -> list[str]:
    try:
        with quiet_hub():
            data = load()
    except (OSError, ValueError, RuntimeError, KeyError) as error:  # not reachable, no such config or split
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"corpus {name!r}: no such file, and as a dataset it cannot be loaded: {error}") from error
    column = "text" if "text" in data.column_names else _first_text_column(name, data)
    return list(data[column])


def _first_text_column(name: str, data: Any) -> str:
    for column, feature in data.features.items():
        if getattr(feature, "dtype", None) in ("string", "large_string"):
            return column
    raise ValueError(f"corpus {name!r}: the dataset has no text column, only {', '.join(data.column_names)}")


def _pydoc(begin: float = 0.0, end: float = 1.0) -> list[str]:
    """The share from `begin` to `end` of the topics of the language reference, in alphabetical order."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    return texts[round(begin * len(texts)) : round(end * len(texts))]


def _python_source() -> list[str]:
    """Modules of the standard library, every one of its top folder, in alphabetical order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in files]


BUILT_IN = {
    "pydoc": _pydoc,
    "pydoc:first": lambda: _pydoc(0.0, 0.5),
    "pydoc:second": lambda: _pydoc(0.5, 1.0),
    "python": _python_source,
}


def token_windows(
    tokenizer: Any, texts: Sequence[str], length: int, count: int, seed: int = 0, *, name: str = "length=",
    corpus: str | None = None,
) -> Int[np.ndarray, "n S"]:
    """Windows of a corpus whose documents are put one behind the other.

    The windows are evenly spaced and disjoint; the seed shifts all of them together. Each starts with the
    token that opens a sequence, where the tokenizer has one and adds it.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        texts: the documents.
        length: tokens of a window.
        count: windows wanted; fewer come back where the corpus is too short for so many.
        seed: of the common shift.
        name: of the length and the sign behind it, as the caller wrote them.
        corpus: name of the texts, where `length` is not the caller's to choose: what is too short is the text then.

    Returns:
        int32 `[n, length]`, 1 <= n <= count.

    Raises:
        ValueError: length or count below 1, or a corpus that is too short for one window.
    """
    if length < 1 or count < 1:
        raise ValueError(f"length={length}, windows={count}: must both be at least 1")
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass token ids to collect_moments instead")
    opening = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    body = length - len(opening)
    if body < 1:
        raise ValueError(f"length={length}: no room behind the token that opens a sequence")
    ids = np.concatenate([_encode(tokenizer, text) for text in texts] or [np.zeros(0, np.int32)])
    if len(ids) < body:
        if corpus is not None:
            raise ValueError(f"corpus {corpus!r}: has {len(ids)} tokens, must have at least {body}")
        most = len(ids) + len(opening)
        raise ValueError(f"{name}{length}: must be at most {most}, as the corpus has {len(ids)} tokens")
    count = min(count, len(ids) // body)
    slot = len(ids) // count
    shift = int(np.random.default_rng(seed).integers(0, slot - body + 1))
    windows = np.stack([ids[i * slot + shift :][:body] for i in range(count)])
    return np.concatenate([np.tile(np.asarray(opening, np.int32), (count, 1)), windows], axis=1)


def _encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, np.int32)
