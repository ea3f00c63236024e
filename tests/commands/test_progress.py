"""The progress bar while a model loads: a percentage if the total is known, otherwise a moving pulse."""

import io
import sys

from llamaspec.commands.progress import progress_bar


class Terminal(io.StringIO):
    """A stderr stand-in with `isatty()` true."""

    def isatty(self) -> bool:
        return True


def drawn(terminal: Terminal) -> str:
    text = terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    return text


def test_a_stage_of_unknown_size_shows_no_percentage(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("llamaspec.commands.progress.REDRAWN", 0.01)  # only the test causes a redraw
    from rich.progress import Progress

    bars: list[Progress] = []
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda self: (bars.append(self), start(self))[1])
    with progress_bar() as report:
        [bar] = bars
        bar.refresh()
        assert "starting JAX" in (first := drawn(terminal)) and "%" not in first
        report("reading weights", 0.5)
        bar.refresh()
        assert "reading weights" in (second := drawn(terminal)) and "50%" in second
        report("compiling", 0.0)
        bar.refresh()
        last = drawn(terminal)
        assert "compiling (only the first time)" in last and "%" not in last.rpartition("compiling")[2]


def test_no_progress_is_shown_without_a_terminal(capsys):
    with progress_bar() as report:
        report("compiling", 0.0)
    assert capsys.readouterr() == ("", "")
