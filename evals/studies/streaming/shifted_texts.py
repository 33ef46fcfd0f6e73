"""Texts that come with Python, in the domain of the calibration and away from it: tasks for perplexities."""

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowrank_kv_jax.calibration.corpus import Corpus, load_corpus, token_windows
from lowrank_kv_jax.evals.perplexity.run import Window

CALIBRATE, PROSE, CODE = "pydoc:first", "pydoc:second", "python"
"""Halves of the language reference, and the modules of the standard library's top folder."""


def _files(root: Callable[[], str], pattern: str) -> Callable[[], list[Path]]:
    return lambda: sorted(Path(root()).glob(pattern))


def _library() -> str:
    return sysconfig.get_path("stdlib")


FILES: Mapping[str, Callable[[], list[Path]]] = {
    "headers": _files(lambda: sysconfig.get_path("include"), "*.h"),  # C
    "make": lambda: [Path(sysconfig.get_makefile_filename())],
    "html": _files(_library, "idlelib/help.html"),
    "changes": _files(_library, "idlelib/NEWS.txt"),  # notes of releases
    "tables": _files(_library, "encodings/cp*.py"),  # of characters
    "asyncio": _files(_library, "asyncio/*.py"),
    "email": _files(_library, "email/*.py"),
    "unittest": _files(_library, "unittest/*.py"),
}
"""No part of the three texts above."""

MIXED = "prose, then code"
TASKS = ("prose", "code", MIXED)
"""In domain, after a shift, and a shift between what is compressed and what is scored."""
SHIFTED = (*TASKS[1:], *FILES)
"""Every task that is not in domain."""


def text_of(task: str) -> Corpus:
    """The text of a task that has only one.

    Raises:
        ValueError: an unknown task; FileNotFoundError: this Python came without these files.
    """
    built_in = {"prose": PROSE, "code": CODE}
    if task in built_in:
        return load_corpus(built_in[task])
    if task not in FILES:
        raise ValueError(f"task={task!r}: allowed are {', '.join((*TASKS, *FILES))}")
    found = FILES[task]()
    if not found or not all(path.is_file() for path in found):
        raise FileNotFoundError(f"task={task!r}: this Python has no files of it ({', '.join(map(str, found)) or 'none'})")
    return Corpus.of([path.read_text(encoding="utf-8", errors="replace") for path in found], task)


def windows_of(
    tokenizer: Any, task: str, context: int, scored: int, count: int, seed: int
) -> tuple[Corpus, list[Window]]:
    """A task's windows, and the text they are from.

    Args:
        tokenizer: as of `LoadedModel.tokenizer`.
        context, scored: tokens that are compressed, and tokens after them.
        count, seed: see `token_windows`.

    Raises:
        ValueError: a text that is too short for so many windows, and as `text_of`.
    """
    texts = [text_of(name) for name in (("prose", "code") if task == MIXED else (task, task))]
    first, second = (
        token_windows(tokenizer, text.texts, context + scored, count, seed, corpus=text.name) for text in texts)
    if min(len(first), len(second)) < count:
        raise ValueError(f"task={task!r}: the text has {min(len(first), len(second))} windows of {context + scored} "
                         f"tokens, not {count}")
    cut = [Window(i, tuple(map(int, a[:context])), tuple(map(int, b[context:])))
           for i, (a, b) in enumerate(zip(first, second, strict=True))]
    if task != MIXED:
        return texts[0], cut
    return Corpus.of(texts[0].texts + texts[1].texts, f"{texts[0].name}>{texts[1].name}"), cut
