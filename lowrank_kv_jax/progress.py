"""Progress of long work, for people who watch, and for those who read a log."""

import sys
import time

LINE_EVERY_S = 60
"""Seconds between two lines where standard error is no terminal."""


class ProgressBar:
    """A bar on standard error, a line a minute where that is a file or a pipe, or nothing.

    A terminal has room for one: work within other work shows nothing of its own there, and its lines in a log.
    """

    _drawn = 0

    def __init__(self, title: str, total: float, shown: bool):
        self._title, self._total, self._shown = title, total, shown
        self._bar, self._done = None, 0.0

    def __enter__(self):
        self._begin = self._told = time.monotonic()
        if self._shown and sys.stderr.isatty() and not ProgressBar._drawn:
            ProgressBar._drawn += 1
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                       TimeElapsedColumn(), TextColumn("elapsed, left"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True,
                                 speed_estimate_period=300)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def advance(self, done: float = 1, title: str | None = None):
        """Some work is done; from now on the bar has another title, if one is given."""
        self._done += done
        self._title = title or self._title
        if self._bar is not None:
            self._bar.update(self._task, advance=done, description=self._title)
        elif self._shown and not ProgressBar._drawn and time.monotonic() - self._told >= LINE_EVERY_S:
            self._told = time.monotonic()
            line = f"{self._title}: {self._done / self._total:.0%} after {self._told - self._begin:.0f} s"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.stop()
            ProgressBar._drawn -= 1
