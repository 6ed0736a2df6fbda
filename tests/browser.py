"""A real browser for pages: what is in a document once its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --enable-logging=stderr"
)


class Opened(NamedTuple):
    """The document as HTML, and what the page said to the console."""

    html: str
    console: list[str]


def open_page(page: Path, *, fragment: str = "") -> Opened:
    """Open a page, and wait until it has loaded."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [BROWSER, *_FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom",
             f"{page.as_uri()}#{fragment}"],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])
