"""The program of its own process: `lowrank-kv`, `python -m lowrank_kv_jax.cli`."""

import logging
import os
import signal
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
    signal.signal(signal.SIGINT, _interrupt)
    code = main()
    if code == INTERRUPTED:  # at once: with threads still at work the interpreter has crashed while it ended
        os._exit(code)
    return code


def _interrupt(*_) -> None:
    """Ctrl-C: at once while JAX is being imported, which would drop it or take it for a failure."""
    if hasattr(sys.modules.get("jax"), "jit"):
        raise KeyboardInterrupt
    print("lowrank-kv: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(program())
