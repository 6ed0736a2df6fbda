"""What is said while a person waits: on a terminal alone, and erased at the end."""

import io
import re
import sys
import time

import pytest
import tqdm.std
from launching import PATIENCE

from ckpt_tools.cli import render


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
    monkeypatch.setattr(render, "is_quiet", lambda: quiet)
    monkeypatch.setattr(render, "_SILENT", PATIENCE)
    with render.clock("reading"):
        pass
    assert stderr.getvalue() == ""
    monkeypatch.setattr(render, "_SILENT", 0.001)
    drawn = terminal and not quiet and not dumb
    with render.clock("reading"):
        until = time.monotonic() + PATIENCE
        while drawn and not stderr.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    said = r"(reading: \d s\r)+ {12}\r" if drawn else ""
    assert re.fullmatch(said, stderr.getvalue())


def test_a_bar_names_its_phase_and_starts_with_the_first_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(render, "is_quiet", lambda: False)
    now = time.time()
    monkeypatch.setattr(tqdm.std, "time", lambda: now)
    monkeypatch.setattr(time, "time", lambda: now)
    with render.byte_bar(label="write") as bar:
        bar.expect(4000)
        now += 5  # planning
        bar(1000)
        now += 1
        bar(1000)
        bar.name("check")
        now += 1
        bar(2000)
    first, *_, last = (line for line in stderr.getvalue().split("\r") if "|" in line)
    assert first.startswith("write:  50%")
    assert last.startswith("check: 100%")
    assert "2.00kB/s" in first
