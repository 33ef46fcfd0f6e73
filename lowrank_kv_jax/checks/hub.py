"""Data sets of the Hugging Face hub, which may not be reached."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Without the hub's lines on every try: what failed in the end is told by the error."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
