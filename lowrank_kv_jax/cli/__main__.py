"""The program of its own process: `lowrank-kv`, `python -m lowrank_kv_jax.cli`."""

import logging
import os
import sys

from lowrank_kv_jax.cli import INTERRUPTED, main


def program() -> int:
    """`main`, in a process whose standard error is for its one line.

    Orbax's threads log each of their failures with a traceback and print what they meet behind the first one, after
    that one was raised and told. A library cannot silence them for its users; a program can, for its whole life.
    """
    if "--debug" not in sys.argv:
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(lambda _: False)
        sys.unraisablehook = lambda _: None
    code = main()
    if code == INTERRUPTED:  # at once: with threads still at work the interpreter has crashed while it ended
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(program())
