"""A real browser for pages: what is in a document once its scripts have run."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path
from typing import NamedTuple

from launching import PATIENCE

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
            capture_output=True, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


# Says in the document what of the frame is cut off, or hidden though it has text.
_LOST = """<script>addEventListener("load", () => {
  const { document: inner, innerWidth: width } = document.querySelector("iframe").contentWindow;
  const isLost = (e) => e.textContent && (e.getBoundingClientRect().right > width + 1
    || (getComputedStyle(e).display === "none" && !e.matches(".heads, .heads *, thead, thead *")));
  const all = Array.from(inner.querySelectorAll("main *:not([hidden], [hidden] *)"));
  const lost = all.filter(isLost).map((e) => e.outerHTML.slice(0, 60));
  document.documentElement.dataset.lost = `${width}: ${lost.join()}`; });</script>"""


def lost_on_a_phone(page: str, folder: Path) -> str:
    """What a screen of 400 pixels does not show of a page whose folds are all open."""
    opened = escape(page.replace("<details", "<details open"))
    # A window is at least 500 pixels wide, a frame may be narrower.
    frame = f'<iframe width="400" height="900" style="border:0" srcdoc="{opened}"></iframe>'
    (folder / "phone.html").write_text(frame + _LOST)
    found = re.search(r'data-lost="400: ([^"]*)"', open_page(folder / "phone.html").html)
    assert found is not None
    return found[1]
