"""Progress of long work where nobody watches a terminal."""

import io
import sys
import types

from lowrank_kv_jax import progress


def test_a_log_gets_a_line_a_minute(monkeypatch, capsys):
    now = iter([0.0, 30.0, 61.0, 61.0, 70.0, 122.0, 122.0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    with progress.ProgressBar("calibrating", 8, shown=True) as bar:
        for _ in range(4):
            bar.advance()
    assert capsys.readouterr().err.splitlines() == ["calibrating: 25% after 61 s", "calibrating: 50% after 122 s"]


def test_a_line_says_what_is_done_now(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    with progress.ProgressBar("compare", 4, shown=True) as bar:
        bar.advance(1, "compare, needles")
        bar.advance(1)
    assert capsys.readouterr().err == "compare, needles: 25% after 0 s\ncompare, needles: 50% after 0 s\n"


def test_nothing_is_said_where_it_is_not_shown(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0)
    with progress.ProgressBar("calibrating", 8, shown=False) as bar:
        bar.advance()
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_one_bar_at_a_time(monkeypatch):
    """Work within other work, as calibration is within `compare`: its bar would be drawn into the other."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.ProgressBar("compare", 2, shown=True) as bar, progress.ProgressBar("calibrating", 2, shown=True) as inner:
        inner.advance(1)
        assert bar._bar is not None and inner._bar is None
    with progress.ProgressBar("calibrating", 2, shown=True) as again:
        assert again._bar is not None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
