"""What is said while a person waits: on a terminal alone, and erased at the end."""

import io
import sys
import time

import pytest

from ckpt_tools.cli import progress


@pytest.mark.parametrize(
    ("terminal", "quiet", "dumb"),
    [(True, False, ""), (True, True, ""), (False, False, ""), (True, False, "dumb")],
)
def test_a_long_wait_is_said_on_a_terminal_and_erased(
    monkeypatch: pytest.MonkeyPatch, *, terminal: bool, quiet: bool, dumb: str
) -> None:
    monkeypatch.setenv("TERM", dumb)
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "is_quiet", lambda: quiet)
    with progress.clock("reading"):
        pass
    assert stderr.getvalue() == ""
    monkeypatch.setattr(progress, "_SILENT", 0.001)
    drawn = terminal and not quiet and not dumb
    with progress.clock("reading"):
        until = time.monotonic() + 10
        while drawn and not stderr.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert stderr.getvalue() == (f"reading: 0 s\r{' ' * 12}\r" if drawn else "")
