"""`--import MODULE`: methods of your own on the command line."""

import importlib
import os
import sys
from collections.abc import Sequence

OPTION = "--import"


def take_imports(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--import MODULE`, which may stand anywhere before `--`, and the modules.

    Raises:
        ValueError: no module is named.
    """
    rest, modules, words = [], [], iter(argv)
    for word in words:
        if word == "--":
            return [*rest, word, *words], modules
        name, equals, module = word.partition("=")
        if name != OPTION:
            rest.append(word)
            continue
        module = module if equals else next(words, "")
        if not module or module.startswith("-"):
            raise ValueError(f"{OPTION} {module!r}: expected the name of a module")
        modules.append(module)
    return rest, modules


def import_modules(modules: Sequence[str]) -> None:
    """Import modules, also those of the working directory: what they register is known then.

    Raises:
        ValueError: one that is not there, or that fails.
    """
    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ValueError(f"{OPTION} {module}: {type(error).__name__}: {error}") from error
