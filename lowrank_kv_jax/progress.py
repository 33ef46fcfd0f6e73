"""Progress of long work, for people who watch."""


class ProgressBar:
    """A progress bar on standard error, or nothing."""

    def __init__(self, title: str, total: float, shown: bool):
        self._title, self._total, self._shown, self._bar = title, total, shown, None

    def __enter__(self):
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                       TimeElapsedColumn(), TextColumn("elapsed, left"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True,
                                 speed_estimate_period=300)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def advance(self, done: float = 1):
        if self._bar is not None:
            self._bar.advance(self._task, done)

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.stop()
