"""The frame of a page: one HTML file with its style, its script and its data, and no network.

It knows nothing of what the page shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape

from ckpt_tools.cli.render import Json, printable

_FOLDER = os.path.dirname(__file__)
# Nothing may be fetched, whatever a name in the checkpoint tries to say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def text(value: str) -> str:
    """Text out of a checkpoint as HTML."""
    return escape(printable(value))


def page(title: str, body: Sequence[str], *, scripts: Sequence[str], data: Json = None) -> str:
    """A whole page: its body as HTML, then the scripts of this folder, which find ``data``."""
    # A script's text ends at "</", wherever that stands.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{_file('page.css')}</style></head><body>",
        '<button id="theme" title="Light or dark">◐</button>',
        *body,
        f'<script type="application/json" id="data">{packed}</script>',
        *(f"<script>\n{_file(name)}</script>" for name in ("theme.js", *scripts)),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _file(name: str) -> str:
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()
