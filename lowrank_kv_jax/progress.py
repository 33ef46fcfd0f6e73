"""Progress of long work, for people who watch."""


class ProgressBar:
    """A progress bar on standard error, or nothing."""

    def __init__(self, title: str, total: int, shown: bool):
        self._title, self._total, self._shown, self._bar = title, total, shown, None

    def __enter__(self):
        if self._shown:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total)
        return self

    def advance(self):
        if self._bar is not None:
            self._bar.advance(self._task)

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.stop()
